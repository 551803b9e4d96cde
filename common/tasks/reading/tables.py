"""Tables of numbers with a column to predict."""

import torch
from torch import Tensor

from ...data.sets import Batch, InMemoryDataset
from ...errors import UsageError
from .sources import load_tables

ADVICE = "use --data diabetes or synthetic, or the path of a .csv file"


class TableDataset(InMemoryDataset):
    """Rows of numbers, in memory.

    Samples are {"features": float32 of shape (num_features,), "target": float32, 0-dim}.

    Args:
        features: float, shape (n, num_features).
        target: float, shape (n,).
    """

    def __init__(self, features: Tensor, target: Tensor):
        self.features, self.target = features.float(), target.float()

    @property
    def num_features(self) -> int:
        """The number of columns without the target."""
        return self.features.shape[1]

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, ids: Tensor) -> Batch:
        return {"features": self.features[ids], "target": self.target[ids]}


def load_numbers(data: str, target: str | None) -> TableDataset:
    """Loads a table of numbers from a .csv, .tsv, .jsonl or .parquet file, perhaps packed, and standardises each
    column. The columns beside the target are the features. Raises UsageError for no such file or column, too few rows
    or columns, a value that is missing or not finite, or a constant target."""
    table, *others = load_tables(data, ADVICE)
    names = table.column_names
    if others:
        raise UsageError(f"--data {data} has several splits, but all rows are fitted: use the path of one file")
    if target is None:
        raise UsageError(f"--data {data} needs --target, the column to predict: use one of {', '.join(names)}")
    if target not in names:
        raise UsageError(f"--target {target}: no such column in {data}; use one of {', '.join(names)}")
    if len(table) < 2 or len(names) < 2:
        raise UsageError(f"--data {data} has {len(table)} rows and {len(names)} columns: expected 2 or more")
    values = torch.tensor([[*table.numbers(name)] for name in names], dtype=torch.float64).T
    position = names.index(target)
    if (values[:, position] == values[0, position]).all():
        raise UsageError(f"--target {target} has the same value in each row of {data}: use another column")
    features = torch.cat([values[:, :position], values[:, position + 1 :]], dim=1)
    return TableDataset(standardise(features), standardise(values[:, position]))


def standardise(values: Tensor) -> Tensor:
    """Subtracts each column's mean and divides by its standard deviation. A constant column becomes zero."""
    centred = values - values.mean(dim=0)
    return centred / centred.square().mean(dim=0).sqrt().where(centred.abs().amax(dim=0) > 1e-12, 1.0)
