"""What the loop would refuse of a recipe under each config of ours: for `at_fit`."""

import json
import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from accelerate_recipes import bundle
from accelerate_recipes.catalog import SIZES
from accelerate_recipes.doctor import asked


def answers(*given: Any, **keywords: Any) -> dict[str, list[str]]:
    *data, config = given[:7]  # of `fit`
    lines = {}
    for path in bundle.configs():
        size = SIZES.get(path.stem, ["--pipeline_stages", "1"])
        with patch.dict(os.environ, {asked.QUESTION: json.dumps([str(path), False, []])}):
            flags = replace(config, **{size[0].removeprefix("--"): int(size[1])})
            lines[path.stem] = [*map(str, asked.refusals(*data, flags, *given[7:], **keywords)["refusals"])]
    return lines
