"""predictions.jsonl: what `forward_step` returns for each evaluation sample."""

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor


def write_predictions(path: Path, examples: dict[str, Tensor]) -> None:
    """Writes one JSON object per sample, in the order of the set; null stands for a number that is not finite.
    Replaces the file of an earlier evaluation.

    Args:
        path: the file.
        examples: {name: value of each sample, of shape (samples,)}; vectors are left out.
    """
    columns = {name: values.tolist() for name, values in examples.items() if values.ndim == 1}
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for sample, row in enumerate(zip(*columns.values())):
            file.write(json.dumps({"sample": sample, **dict(zip(columns, map(_or_null, row)))}) + "\n")
    part.rename(path)


def _or_null(value: Any) -> Any:
    return value if math.isfinite(value) else None
