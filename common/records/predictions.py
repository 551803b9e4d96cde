"""predictions.jsonl: what `forward_step` returns for each evaluation sample."""

import json
from pathlib import Path

from torch import Tensor

from ..files import for_json


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
            file.write(json.dumps({"sample": sample, **dict(zip(columns, for_json(list(row))))}) + "\n")
    part.rename(path)
