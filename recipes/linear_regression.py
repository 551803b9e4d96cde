"""Fit a line through many dimensions: least squares by stochastic gradient descent.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py

The default data, scikit-learn's diabetes set (442 patients x 10 measurements), is embedded. Expect
R² 0.518, that of the closed-form solution, after five seconds on two CPU cores. The first example of
many a tutorial, full batches of synthetic data, and a table of your own:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py --data synthetic \\
        --batch_size 100 --epochs 5 --learning_rate 0.01 --momentum 0 --lr_schedule constant --log_every 1
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/linear_regression.py --data file.csv \\
        --target column
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from common import RunConfig, Schedule, UsageError, fit, flag, load_exported, parameter_groups, run, start
from common.data import Batch
from common.data.tables import TableDataset, load_csv, load_diabetes, make_linear


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, beside those that all have."""

    data: str = "diabetes"
    epochs: int = 100
    batch_size: int = 64
    learning_rate: float = 0.05
    lr_schedule: Schedule = "cosine"
    max_grad_norm: float = 0.0
    log_every: int = 100
    eval_every: int | None = 200
    momentum: float = flag(0.9, "of stochastic gradient descent", minimum=0)
    target: str | None = flag(None, "the column to predict, where --data is a CSV file")
    num_samples: int = flag(100, "rows of --data synthetic", minimum=2)
    num_features: int = flag(10, "columns of --data synthetic", minimum=1)


def load_table(config: Config) -> TableDataset:
    """The table that `--data` names."""
    if config.data == "diabetes":
        return load_diabetes()
    if config.data == "synthetic":
        return make_linear(config.num_samples, config.num_features)
    if not config.data.endswith(".csv"):
        raise UsageError(f"--data {config.data}: expected diabetes, synthetic or the path of a .csv file")
    return load_csv(Path(config.data), config.target)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Per-example loss, the squared error."""
    return {"loss": (model(batch["features"]).squeeze(-1) - batch["target"]).square()}


def least_squares(table: TableDataset) -> Tensor:
    """The best weights there are, and after them the bias, in float64, shape (num_features + 1,)."""
    features = torch.cat([table.features, torch.ones(len(table), 1)], dim=1).double()
    # By singular values, as columns may depend on each other.
    return torch.linalg.lstsq(features, table.target.double(), driver="gelsd").solution


def main(config: Config) -> None:
    """Trains and evaluates on all rows, and compares with the closed-form solution."""
    accelerator = start(config)
    table = load_table(config)
    variance = table.target.var(correction=0).item()
    model = nn.Linear(table.num_features, 1)
    optimizer = torch.optim.SGD(parameter_groups(model, config.weight_decay), config.learning_rate, config.momentum)

    def summarize(means: dict[str, float]) -> dict[str, float]:
        return means | {"r2": 1 - means["loss"] / variance}

    fit(accelerator, model, optimizer, forward_step, table, table, config, summarize)

    exported = load_exported(config.output_dir)
    fitted = torch.cat([exported["weight"][0], exported["bias"]]).double()
    best = least_squares(table)
    residuals = table.target - table.features @ best[:-1].float() - best[-1].float()
    best_r2 = 1 - residuals.square().mean().item() / variance
    distance = ((fitted - best).norm() / best.norm()).item()
    accelerator.print(f"closed form: R² {best_r2:.6f}; the weights are {distance:.2%} from its own")


if __name__ == "__main__":
    run(main, Config)
