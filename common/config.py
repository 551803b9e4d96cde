"""RunConfig, the flags that all recipes share."""

import dataclasses
import functools
import math
import operator
import os
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import UsageError
from .schedule import Schedule

BOUNDS = {  # name: (whether a value is outside, what a value must be)
    "minimum": (operator.lt, "{} or more"),
    "maximum": (operator.gt, "{} or less"),
    "above": (operator.le, "more than {}"),
    "below": (operator.ge, "less than {}"),
}


def flag(default: Any, help: str, **bounds: float) -> Any:
    """A config field that is also a command-line flag.

    Args:
        default: value if the flag is not given. A recipe's subclass may override only the default.
        help: what `--help` prints.
        bounds: `minimum` and `maximum` of the values, or limits that they must be `above` or `below`.
    """
    if unknown := {*bounds} - {*BOUNDS}:
        raise TypeError(f"flag() has no {', '.join(unknown)}: use {', '.join(BOUNDS)}")
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclass(kw_only=True)
class RunConfig:
    """The flags that all recipes share. A recipe extends the class, overrides defaults and adds its own flags."""

    data: str = flag(
        "",
        "name of an embedded dataset, a local path, or a Hub id such as nyu-mll/glue:mrpc; or several with weights: "
        "a.jsonl:3,b.jsonl:1",
    )
    mixture_ends: Literal["first", "all"] = flag(
        "first",
        "with several sources in --data: end an epoch when the first one is used up, or repeat smaller ones until all "
        "are used up",
    )
    num_workers: int = flag(
        0, "DataLoader workers per training process; use some if the dataset decodes files", minimum=0, below=1025
    )
    epochs: int = flag(1, "passes over the training data", minimum=1)
    max_steps: int | None = flag(None, "optimizer steps; overrides --epochs", minimum=1)
    batch_size: int = flag(64, "samples per optimizer step, over all processes and accumulation", minimum=1)
    micro_batch_size: int | None = flag(
        None, "samples per forward pass per process; lower it to save memory (more accumulation)", minimum=1
    )
    learning_rate: float = flag(1e-3, "peak learning rate", above=0)
    warmup_steps: int = flag(0, "number of optimizer steps in which the learning rate rises to its peak", minimum=0)
    lr_schedule: Schedule = flag(
        "constant", "learning-rate schedule after warm-up; wsd decays in the last fifth, one_cycle has its own warm-up"
    )
    weight_decay: float = flag(0.0, "weight decay of matrices and kernels; not of biases, norms, embeddings", minimum=0)
    max_grad_norm: float = flag(1.0, "clip gradients to this global L2 norm; 0: do not clip", minimum=0)
    seed: int = flag(0, "seed of the initial weights, the sample order and all random numbers", minimum=0)
    early_stopping_patience: int | None = flag(
        None, "end the run after this many evaluations in a row without a new best value", minimum=1
    )
    ema_decay: float = flag(
        0.0,
        "evaluate and export a moving average of the weights with this decay, such as 0.999; 0: no average",
        minimum=0,
        below=1,
    )
    output_dir: Path = flag(None, "folder for records, checkpoints and model/ (default: outputs/<recipe>)")
    save_every: int = flag(0, "optimizer steps between checkpoints; 0: no checkpoints", minimum=0)
    keep_checkpoints: int = flag(2, "how many of the newest checkpoints to keep", minimum=1)
    async_save: bool = flag(
        False, "write checkpoints during the next steps; training waits only for a copy into CPU memory"
    )
    resume_from_checkpoint: str | None = flag(
        None, "'latest' (the newest in output_dir; from scratch if there is none) or the path of a checkpoint"
    )
    overwrite_output_dir: bool = flag(False, "start over in a folder with an earlier run's checkpoints or model")
    metric_for_best_model: str | None = flag(
        None,
        "export the weights with the best value of this evaluation metric to <output_dir>/best/, the last weights "
        "to model/; lower is better for loss, perplexity and error",
    )
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "dtype of the exported weights; auto: as in a pretrained model's files, else as in training"
    )
    log_every: int = flag(10, "optimizer steps between training records", minimum=1)
    eval_every: int | None = flag(
        None, "optimizer steps between evaluations (default: once an epoch); the last step always evaluates", minimum=1
    )
    save_predictions: bool = flag(
        False, "write what forward_step returns for each evaluation sample to <output_dir>/predictions.jsonl"
    )
    evaluate_only: bool = flag(False, "do not train: evaluate the model that an earlier run exported to output_dir")
    report_to: str = flag(
        "", "trackers, separated by commas: tensorboard, trackio, wandb, ... (all that Accelerate supports)"
    )
    pipeline_stages: int = flag(
        1, "processes in a pipeline, each with some of the layers; more processes form several pipelines", minimum=1
    )
    pipeline_schedule: Literal["1f1b", "interleaved", "zbv"] = flag(
        "1f1b", "order of the passes in a pipeline; with interleaved and zbv each process has two stages and waits less"
    )
    expert_parallel: int = flag(
        1, "number of processes that share the experts of each layer; each holds some of them", minimum=1
    )
    check_steps: int = flag(
        2,
        "repeat the first N optimizer steps on one process, and compare the results; 0: no check",
        minimum=0,
        below=1001,
    )
    check_every: int = flag(
        0,
        "every N optimizer steps, after the next save: repeat two steps on one process on the CPU, and compare; "
        "0: never",
        minimum=0,
    )
    hang_timeout: float = flag(1800.0, "end the run after this many seconds without a step; 0: never", minimum=0)
    compile: bool = flag(False, "compile the model with torch.compile: slower start, faster steps")
    deterministic: bool = flag(False, "use only deterministic kernels: slower, but GPU runs repeat bit for bit")
    tf32: bool = flag(False, "let GPUs round the inputs of float32 matrix products to 10 bits: faster, less exact")

    def __post_init__(self) -> None:
        self.output_dir = Path(self.output_dir or f"outputs/{script_name()}")

    def validate(self) -> None:
        """Raises UsageError for a value out of range."""
        for field in dataclasses.fields(self):
            _check(type(self), field.name, getattr(self, field.name))
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            raise UsageError("--early_stopping_patience needs a metric: use --metric_for_best_model loss")
        if os.path.realpath(self.output_dir) == os.sep:  # not resolve(), which fails on circular links
            raise UsageError(f"--output_dir {self.output_dir} is the root of the disk: use another folder")
        if self.deterministic and self.tf32:
            raise UsageError("--deterministic is for exact results, --tf32 rounds them: use one of them")
        if self.pipeline_schedule != "1f1b" and self.pipeline_stages == 1:
            raise UsageError(
                f"--pipeline_schedule {self.pipeline_schedule} needs a pipeline: use --pipeline_stages, too"
            )
        if self.check_every and not self.save_every:
            raise UsageError(f"--check_every {self.check_every} needs checkpoints to check: use --save_every, too")
        if self.overwrite_output_dir and self.resume_from_checkpoint == "latest":  # each restart would start over
            raise UsageError(
                "--overwrite_output_dir starts over, --resume_from_checkpoint latest continues: use one of them; in "
                "a job that may restart use the latter, which starts from scratch if there is no checkpoint"
            )


def script_name() -> str:
    """The file name of the running recipe, without .py."""
    return Path(sys.argv[0]).stem or "recipe"


def _check(config_class: type, name: str, value: Any) -> None:
    """Raises UsageError if the value of a field is not one of its choices, or out of range."""
    hint, metadata = declaration(config_class, name)
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else (value,)
    if value not in choices:  # argparse does not check defaults
        raise UsageError(f"--{name} {value}: no such choice; use one of {', '.join(map(str, choices))}")
    if value is None or isinstance(value, str | bool | Path):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{name} {value}: expected a finite number")
    bounds = {"below": 2**31 if isinstance(value, int) else 1e38} | metadata  # float32 ends there
    for bound, (is_outside, expected) in BOUNDS.items():
        if bound in bounds and is_outside(value, bounds[bound]):
            raise UsageError(f"--{name} {value}: expected {expected.format(bounds[bound])}")


def declaration(config_class: type, name: str) -> tuple[Any, dict[str, Any]]:
    """(type, metadata) of a field, from the class that declared it with `flag`: subclasses may override the default."""
    for cls in config_class.__mro__:
        if (field := getattr(cls, "__dataclass_fields__", {}).get(name)) is not None and field.metadata:
            return _hints(cls)[name], dict(field.metadata)
    return _hints(config_class)[name], {}


_hints = functools.cache(typing.get_type_hints)
