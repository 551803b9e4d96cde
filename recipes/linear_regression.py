"""Fit a linear model: least squares by stochastic gradient descent.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py

Data: scikit-learn's diabetes dataset, embedded (442 patients x 10 measurements); or synthetic; or a CSV, TSV,
JSON-lines or Parquet file.
Expect: R² 0.518, the same as the closed-form solution.
Time: five seconds on two CPU cores.

To train on full batches of synthetic data, as in many tutorials, or on your own table:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py --data synthetic \\
        --batch_size 100 --epochs 5 --learning_rate 0.01 --momentum 0 --lr_schedule constant --log_every 1
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py --data file.csv \\
        --target column
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, Schedule, UsageError, fit, flag, load_exported, parameter_groups, run, start
from accelerate_recipes.common.data import Batch, InMemoryDataset, say
from accelerate_recipes.common.tasks.reading.sources import load_tables, sklearn_file

ADVICE = "use --data diabetes or synthetic, or the path of a .csv file"


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "diabetes"
    epochs: int = 100
    batch_size: int = 64
    learning_rate: float = 0.05
    lr_schedule: Schedule = "cosine"
    max_grad_norm: float = 0.0
    log_every: int = 100
    eval_every: int | None = 200
    momentum: float = flag(0.9, "momentum of stochastic gradient descent", minimum=0)
    target: str | None = flag(None, "the column to predict, if --data is a file")
    num_samples: int = flag(100, "rows of --data synthetic", minimum=2)
    num_features: int = flag(10, "columns of --data synthetic", minimum=1)


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


def standardise(values: Tensor) -> Tensor:
    """Subtracts each column's mean and divides by its standard deviation. A constant column becomes zero."""
    size = values.abs().amax(dim=0)
    scaled = values / size.where(size > 0, 1.0)  # squares of very large or small numbers have no place in a float
    centred = scaled - scaled.mean(dim=0)
    varies = centred.abs().amax(dim=0) > 1e-12
    return centred.where(varies, 0.0) / centred.square().mean(dim=0).sqrt().where(varies, 1.0)


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


def load_numbers(data: str, target: str | None) -> TableDataset:
    """Loads a table of numbers from a .csv, .tsv, .jsonl or .parquet file, perhaps packed, and standardises each
    column. All columns except the target are features. Raises UsageError for a missing file or column, too few rows or
    columns, a value that is missing or not finite, or a constant target."""
    table, *others = load_tables(data, ADVICE)
    names = [name for name in table.column_names if name]
    if len(names) < len(table.column_names):
        say(f"--data {data}: a column has no name, such as the index that pandas writes: left out")
    if others:
        raise UsageError(f"--data {data} has several splits, but all rows are fitted: use the path of one file")
    if target is None:
        raise UsageError(f"--data {data} needs --target, the column to predict: use one of {', '.join(names)}")
    if target not in names:
        raise UsageError(f"--target {target}: no such column in {data}; use one of {', '.join(names)}")
    if len(table) < 2 or len(names) < 2:
        raise UsageError(f"--data {data} has {len(table)} rows and {len(names)} columns: expected 2 or more of each")
    values = torch.tensor([[*table.numbers(name)] for name in names], dtype=torch.float64).T
    position = names.index(target)
    if (values[:, position] == values[0, position]).all():
        raise UsageError(f"--target {target} has the same value in each row of {data}: use another column")
    features = torch.cat([values[:, :position], values[:, position + 1 :]], dim=1)
    return TableDataset(standardise(features), standardise(values[:, position]))


def load_table(config: Config) -> TableDataset:
    """Loads the table that `--data` names."""
    if config.data == "diabetes":
        return load_diabetes()
    if config.data == "synthetic":
        return make_linear(config.num_samples, config.num_features)
    return load_numbers(config.data, config.target)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each example: the squared error."""
    return {"loss": (model(batch["features"]).squeeze(-1) - batch["target"]).square()}


def least_squares(table: TableDataset) -> Tensor:
    """The closed-form solution: the weights, then the bias, in float64, shape (num_features + 1,)."""
    features = torch.cat([table.features, torch.ones(len(table), 1)], dim=1).double()
    # gelsd uses singular values: columns may be linearly dependent.
    return torch.linalg.lstsq(features, table.target.double(), driver="gelsd").solution


def main(config: Config) -> None:
    """Trains and evaluates on all rows, then compares the weights with the closed-form solution."""
    accelerator = start(config)
    table = load_table(config)
    variance = table.target.var(correction=0).item()
    model = nn.Linear(table.num_features, 1)
    optimizer = torch.optim.SGD(parameter_groups(model, config.weight_decay), config.learning_rate, config.momentum)

    def summarize(means: dict[str, float]) -> dict[str, float]:
        return means | {"r2": 1 - means["loss"] / variance}

    fit(accelerator, model, optimizer, forward_step, table, table, config, summarize=summarize)

    exported = load_exported(config.output_dir)
    fitted = torch.cat([exported["weight"][0], exported["bias"]]).double()
    best = least_squares(table)
    residuals = table.target - table.features @ best[:-1].float() - best[-1].float()
    best_r2 = 1 - residuals.square().mean().item() / variance
    distance = ((fitted - best).norm() / best.norm()).item()
    accelerator.print(f"closed form: R² {best_r2:.6f}; the trained weights differ by {distance:.2%}")


if __name__ == "__main__":
    run(main, Config)
