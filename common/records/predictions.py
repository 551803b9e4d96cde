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
        examples: {name: values of each sample, of shape (samples, ...)}.
    """
    columns = {name: values.tolist() for name, values in examples.items()}
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for sample, row in enumerate(zip(*columns.values())):
            file.write(json.dumps({"sample": sample, **dict(zip(columns, map(_or_null, row)))}) + "\n")
    part.rename(path)


def _or_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_or_null(item) for item in value]
    return value if math.isfinite(value) else None
