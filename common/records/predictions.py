"""predictions.jsonl: what `forward_step` returns for each evaluation sample."""

import json
from pathlib import Path

from torch import Tensor

from ..files import for_json, replace_file


def write_predictions(path: Path, examples: dict[str, Tensor]) -> None:
    """Writes one JSON object per sample, in the order of the set; null stands for a number that is not finite.
    Replaces the file of an earlier evaluation.

    Args:
        path: the file.
        examples: {name: values of each sample, of shape (samples, ...)}.
    """
    columns = {name: values.tolist() for name, values in examples.items()}
    rows = (dict(zip(columns, for_json(list(row)))) for row in zip(*columns.values()))
    lines = [json.dumps({"sample": sample, **row}) + "\n" for sample, row in enumerate(rows)]
    replace_file(path, "".join(lines).encode())
