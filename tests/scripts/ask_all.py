"""What the loop would refuse of a recipe under each config of ours: for `at_fit`."""

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from accelerate_recipes import bundle
from accelerate_recipes.doctor import asked
from accelerate_recipes.matrix import SIZES


def answers(_: None, *given: Any, **options: Any) -> dict[str, list[str]]:
    *data, config = given  # of `fit`
    lines = {}
    for path in bundle.configs():
        size = SIZES.get(path.stem, ["--pipeline_stages", "1"])
        with patch.dict(os.environ):
            flags = replace(config, **{size[0].removeprefix("--"): int(size[1])})
            answer = asked.refusals([str(path), False, [], True], *data, flags, **options)
            lines[path.stem] = [*map(str, answer["refusals"])]
    return lines
