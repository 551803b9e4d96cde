"""Tables of numbers with a column to predict: embedded, synthetic, or a CSV file."""

import csv
import warnings
from pathlib import Path

import numpy
import torch
from torch import Tensor

from ..data.batches import Batch, InMemoryDataset
from ..errors import UsageError
from .embedded import sklearn_file


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


def load_diabetes() -> TableDataset:
    """scikit-learn's diabetes set, 442 patients x 10 measurements, standardised.

    Source: Efron, Hastie, Johnstone and Tibshirani (2004), Least Angle Regression.
    """
    features = numpy.loadtxt(sklearn_file("diabetes_data_raw.csv.gz"))
    target = numpy.loadtxt(sklearn_file("diabetes_target.csv.gz"))
    return TableDataset(standardise(torch.from_numpy(features)), standardise(torch.from_numpy(target)))


def make_linear(num_samples: int, num_features: int) -> TableDataset:
    """Normally distributed features x1, x2, ... and the target x1 + 2 x2 + 3 x3 + ... + 1, without noise.

    The table does not depend on the seed of the run.
    """
    features = torch.randn(num_samples, num_features, generator=torch.Generator().manual_seed(0))
    return TableDataset(features, features @ torch.arange(1.0, num_features + 1) + 1)


def load_csv(path: Path, target: str | None) -> TableDataset:
    """Loads a CSV file with a header and only numbers below it, and standardises each column.

    Args:
        path: the file, with commas, semicolons or tabs between columns.
        target: the column to predict; the others are the features.

    Raises:
        UsageError: no such file or column, too few rows or columns, a value that is missing or not finite,
            or a constant target.
    """
    import pandas  # not at the top: the import takes half a second

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows that are longer than the header
            table = pandas.read_csv(path, sep=None, engine="python", dtype=str, keep_default_na=False, index_col=False)
    except pandas.errors.ParserWarning:
        raise UsageError(f"--data {path}: the rows have more values than the header has names: correct it") from None
    except (OSError, ValueError, csv.Error, pandas.errors.ParserError) as error:  # ValueError: not text
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"--data {path} cannot be read as CSV ({reason}): expected a header and rows") from None
    columns = ", ".join(table.columns)
    if target is None:
        raise UsageError(f"--data {path} needs --target, the column to predict: type one of {columns}")
    if target not in table.columns:
        raise UsageError(f"--target {target}: no such column in {path}; type one of {columns}")
    if len(table) < 2 or len(table.columns) < 2:
        raise UsageError(f"--data {path} has {len(table)} rows and {len(table.columns)} columns: expected 2 or more")
    numbers = table.apply(pandas.to_numeric, errors="coerce").to_numpy(numpy.float64)
    for row, column in numpy.argwhere(~numpy.isfinite(numbers))[:1]:
        raise UsageError(
            f"--data {path}: column {table.columns[column]}, row {row + 1} below the header: expected a number, "
            f"got '{table.iloc[row, column]}'; correct it or remove the row or column"
        )
    values = torch.tensor(numbers)
    position = table.columns.get_loc(target)
    if (values[:, position] == values[0, position]).all():
        raise UsageError(f"--target {target} has the same value in each row of {path}: type another column")
    features = torch.cat([values[:, :position], values[:, position + 1 :]], dim=1)
    return TableDataset(standardise(features), standardise(values[:, position]))


def standardise(values: Tensor) -> Tensor:
    """Subtracts each column's mean and divides by its standard deviation. A constant column becomes zero."""
    centred = values - values.mean(dim=0)
    return centred / centred.square().mean(dim=0).sqrt().where(centred.abs().amax(dim=0) > 1e-12, 1.0)
