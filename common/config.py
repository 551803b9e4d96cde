"""RunConfig, the flags that all recipes share, and the command-line parser."""

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from common.errors import UsageError
from common.schedule import Schedule


def flag(
    default: Any, help: str, minimum: float | None = None, above: float | None = None, below: float | None = None
) -> Any:
    """A config field that is also a command-line flag.

    Args:
        default: value if the flag is not given. A recipe's subclass may override the default alone.
        help: what `--help` prints.
        minimum: the smallest accepted value.
        above: the value must be greater than this.
        below: the value must be less than this.
    """
    metadata = {"help": help, "minimum": minimum, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class RunConfig:
    """The flags that all recipes share. A recipe extends the class, overrides defaults and adds its own flags."""

    data: str = flag("", "name of an embedded dataset, a Hub id or a local path")
    output_dir: Path = flag(None, "folder for records, checkpoints and model/ (default: outputs/<recipe>)")
    epochs: int = flag(1, "passes over the training data", minimum=1)
    max_steps: int | None = flag(None, "optimizer steps; overrides --epochs", minimum=1)
    batch_size: int = flag(64, "samples per optimizer step, over all processes and accumulation", minimum=1)
    micro_batch_size: int | None = flag(
        None, "samples per forward pass per process; lower it to save memory (more accumulation)", minimum=1
    )
    pipeline_stages: int = flag(
        1, "pipeline stages: processes that each hold some of the layers; several pipelines divide the batch", minimum=1
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = flag("1f1b", "order of micro-batches; 1f1b keeps fewer activations")
    pipeline_split: Literal["layers", "parameters"] = flag("layers", "what to divide equally among the stages")
    learning_rate: float = flag(1e-3, "peak learning rate", above=0)
    warmup_steps: int = flag(0, "optimizer steps over which the learning rate rises to its peak", minimum=0)
    lr_schedule: Schedule = flag(
        "constant",
        "learning-rate schedule after warm-up; wsd falls over the last fifth, one_cycle has its own warm-up",
    )
    weight_decay: float = flag(0.0, "weight decay of matrices and kernels; not of biases, norms, embeddings", minimum=0)
    max_grad_norm: float = flag(1.0, "clip gradients to this global L2 norm; 0 does not clip", minimum=0)
    exact_dropout: bool = flag(
        False, "dropout masks that are the same for each number of processes and each --micro_batch_size"
    )
    seed: int = flag(0, "seed of the initial weights, the sample order and all random numbers", minimum=0, below=2**31)
    num_workers: int = flag(0, "data-loading processes per training process, for datasets that decode", minimum=0)
    log_every: int = flag(10, "optimizer steps between training records", minimum=1)
    eval_every: int | None = flag(
        None, "optimizer steps between evaluations (default: once an epoch); the last step always evaluates", minimum=1
    )
    save_every: int = flag(0, "optimizer steps between checkpoints; 0 saves none", minimum=0)
    keep_checkpoints: int = flag(2, "how many of the newest checkpoints to keep", minimum=1)
    async_save: bool = flag(
        False, "write checkpoints during the next steps; training waits only for a copy into CPU memory"
    )
    stop_on_save_error: bool = flag(False, "end the run if a checkpoint cannot be written")
    resume_from_checkpoint: str | None = flag(
        None, "'latest' (the newest in output_dir; a fresh start if there is none) or the path of a checkpoint"
    )
    overwrite_output_dir: bool = flag(False, "start over in a folder with an earlier run's checkpoints or model")
    metric_for_best_model: str | None = flag(
        None,
        "export the weights with the best value of this evaluation metric to <output_dir>/best/, the last weights "
        "to model/; lower is better for loss, perplexity and error",
    )
    early_stopping_patience: int | None = flag(
        None, "end the run after this many evaluations in a row without a new best value", minimum=1
    )
    push_to_hub: str | None = flag(
        None, "upload model/ with a model card to this repository of the Hugging Face Hub; a new one is private"
    )
    hang_timeout: float = flag(1800.0, "end the run after this many seconds without a step; 0: never", minimum=0)
    save_predictions: bool = flag(
        False, "write what forward_step returns for each evaluation sample to <output_dir>/predictions.jsonl"
    )
    evaluate_only: bool = flag(False, "train nothing: evaluate the model that an earlier run exported to output_dir")
    report_to: str = flag(
        "", "trackers, separated by commas: tensorboard, trackio, wandb, ... (all that Accelerate supports)"
    )
    ema_decay: float = flag(
        0.0,
        "evaluate and export a moving average of the weights with this decay, such as 0.999; 0: no average",
        minimum=0,
        below=1,
    )
    compile: bool = flag(False, "compile the model with torch.compile: slower start, faster steps")
    deterministic: bool = flag(False, "use only deterministic kernels: slower, the same bits in each run on a GPU")
    tf32: bool = flag(False, "let GPUs round the inputs of float32 matrix products to 10 bits: faster, less exact")
    profile: bool = flag(False, "trace 3 steps with torch's profiler, to <output_dir>/profile/")
    repeat: str | None = flag(
        None, "run card (run.json) of an earlier run: use its flags; other flags given here override them"
    )
    flags: str | None = flag(
        None, "YAML file of flags, one a line (batch_size: 128); they override --repeat; flags given here override them"
    )

    def __post_init__(self) -> None:
        self.output_dir = Path(self.output_dir or f"outputs/{_script()}")

    def validate(self) -> None:
        """Raises UsageError for a value out of range."""
        for field in dataclasses.fields(self):
            _check(type(self), field.name, getattr(self, field.name))
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            raise UsageError("--early_stopping_patience needs a metric: type --metric_for_best_model loss")


ConfigT = TypeVar("ConfigT", bound=RunConfig)


def parse(config_class: type[ConfigT], arguments: Sequence[str] | None = None) -> ConfigT:
    """Reads the command line into a config.

    Flags are the fields of `config_class`; `--batch_size` and `--batch-size` are the same.

    Args:
        config_class: RunConfig or a dataclass that extends it.
        arguments: words to parse instead of `sys.argv[1:]`.

    Raises:
        UsageError: an unknown flag, or a value of the wrong type or out of range.
        SystemExit: with code 0 after `--help`.
    """
    parser = _Parser(config_class)
    given = parser.parse(sys.argv[1:] if arguments is None else arguments)
    repeated = parser.parse(_flags_of_run(given["repeat"])) if given.get("repeat") else {}
    in_file = parser.parse_file(given["flags"]) if given.get("flags") else {}
    config = config_class(**(repeated | in_file | given))
    config.validate()
    return config


# The groups of --help; a recipe's own flags come first.
GROUPS = {
    "data": ("data", "num_workers"),
    "optimisation": (
        *("epochs", "max_steps", "batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "lr_schedule"),
        *("weight_decay", "max_grad_norm", "ema_decay", "early_stopping_patience", "exact_dropout", "seed"),
    ),
    "saving": (
        *("output_dir", "overwrite_output_dir", "save_every", "keep_checkpoints", "async_save", "stop_on_save_error"),
        *("resume_from_checkpoint", "metric_for_best_model", "push_to_hub"),
    ),
    "records": (
        *("log_every", "eval_every", "evaluate_only", "save_predictions"),
        *("report_to", "profile", "repeat", "flags"),
    ),
    "machine": (
        "pipeline_stages",
        "pipeline_schedule",
        "pipeline_split",
        "compile",
        "deterministic",
        "tf32",
        "hang_timeout",
    ),
}
OF_THE_LAUNCHER = [
    "--config_file",
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--mixed_precision",
    "--num_machines",
    "--num_processes",
]
# Flags that --repeat leaves out: they belong to one run and do not change what it computes.
NOT_REPEATED = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "push_to_hub", "evaluate_only"),
    *("repeat", "flags"),
)


def _script() -> str:
    """The file name of the running recipe, without .py."""
    return Path(sys.argv[0]).stem or "recipe"


def _flags_of_run(card: str) -> list[str]:
    try:
        config = json.loads(Path(card).read_text())["config"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no file or no run card
        raise UsageError(f"--repeat {card} is not a run card: type the path of an earlier run's run.json") from None
    given = [(name, value) for name, value in config if name not in NOT_REPEATED and value is not None]
    return [_as_flag(name, value) for name, value in given]


def _entries(path: str) -> list[tuple[str, yaml.Node]]:
    """(key, value) of each entry of a YAML file. Raises UsageError."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror}): type the path of a YAML file") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"no YAML{place}: expected one flag a line, such as batch_size: 128") from None
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise UsageError("expected one flag a line, such as batch_size: 128")
    return [(key.value, value) for key, value in root.value]


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={value}"


def _check(config_class: type, name: str, value: Any) -> None:
    """Raises UsageError if the value of a field is no choice or out of range."""
    hint, metadata = _declaration(config_class, name)
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else (value,)
    if value not in choices:  # argparse does not check defaults
        raise UsageError(f"--{name} {value}: no such choice; type one of {', '.join(map(str, choices))}")
    if value is None or isinstance(value, str | bool | Path):
        return
    minimum, above, below = (metadata.get(bound) for bound in ("minimum", "above", "below"))
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{name} {value}: expected a finite number")
    if minimum is not None and value < minimum:
        raise UsageError(f"--{name} {value}: expected {minimum} or more")
    if above is not None and value <= above:
        raise UsageError(f"--{name} {value}: expected more than {above}")
    if below is not None and value >= below:
        raise UsageError(f"--{name} {value}: expected less than {below}")


class _Parser(argparse.ArgumentParser):
    def __init__(self, config_class: type[RunConfig]):
        self.config_class = config_class
        super().__init__(prog=f"{_script()}.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        groups = {title: self.add_argument_group(title) for title in ("this recipe", *GROUPS)}
        group_of = {name: groups[title] for title, names in GROUPS.items() for name in names}
        for field in dataclasses.fields(config_class):
            hint, metadata = _declaration(config_class, field.name)
            help, group = metadata.get("help", ""), group_of.get(field.name, groups["this recipe"])
            if field.default not in (None, "") and hint is not bool:
                help += f" (default: {field.default})"
            elif hint is bool:
                help += f" (--no_{field.name} turns it off{'; off by default' * (not field.default)})"
                group.add_argument(f"--no_{field.name}", dest=field.name, action="store_false", help=argparse.SUPPRESS)
            options = {"help": help.replace("%", "%%")} | _options(hint, field.name)
            group.add_argument(f"--{field.name}", **options)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        values, unknown = self.parse_known_args([_with_underscores(argument) for argument in arguments])
        if unknown:
            self._refuse(unknown[0])
        if getattr(values, "help", False):
            # Every process gets the same command line; one of them prints.
            if os.environ.get("RANK", "0") == "0":
                self.print_help()
            raise SystemExit(0)
        return vars(values)

    def parse_file(self, path: str) -> dict[str, Any]:
        """The flags in a YAML file. Raises UsageError with the name of the file."""
        words: dict[str, str] = {}
        try:
            for key, node in _entries(path):
                name = key.replace("-", "_")
                if name in words:
                    raise UsageError(f"{name} is in the file twice: remove one")
                words[name] = self._word(name, node)
            values = self.parse([word for word in words.values() if word])
            for name, value in values.items():
                _check(self.config_class, name, value)
        except UsageError as error:
            raise UsageError(f"--flags {path}: {error}") from None
        return values

    def _word(self, name: str, node: yaml.Node) -> str:
        """An entry of a YAML file as on the command line. The text is the file's: YAML would read 1e-3 as text and 010
        as 8. Empty for null."""
        if name in ("flags", "repeat", "help"):
            self.error(f"--{name} belongs on the command line")
        if name not in {field.name for field in dataclasses.fields(self.config_class)}:
            self._refuse(f"--{name}")
        if not isinstance(node, yaml.ScalarNode):
            self.error(f"--{name}: expected one value, got a list or a mapping")
        if node.tag == "tag:yaml.org,2002:null":
            return ""
        if _declaration(self.config_class, name)[0] is not bool:
            return f"--{name}={node.value}"
        if node.tag != "tag:yaml.org,2002:bool":
            self.error(f"--{name}: expected true or false, got '{node.value}'")
        return _as_flag(name, yaml.SafeLoader.bool_values[node.value.lower()])

    def _refuse(self, word: str) -> typing.NoReturn:
        """Raises UsageError for a word that is no flag."""
        name = word.partition("=")[0]
        flags = [option for option in self._option_string_actions if option.startswith("--") and option != name]
        if name in OF_THE_LAUNCHER:
            self.error(f"{name} belongs before the script: accelerate launch {name} ... {self.prog}")
        close = difflib.get_close_matches(name, flags, n=1)
        advice = f"did you mean {close[0]}?" if close else "--help lists them"
        self.error(f"{word}: no such flag; {advice}")

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _declaration(config_class: type, name: str) -> tuple[Any, dict[str, Any]]:
    """(type, metadata) of a field, from the class that declared it with `flag`: a subclass may override the
    default alone."""
    for cls in config_class.__mro__:
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            return typing.get_type_hints(cls)[name], dict(field.metadata)
    return typing.get_type_hints(config_class)[name], {}


def _options(hint: Any, name: str) -> dict[str, Any]:
    if isinstance(hint, types.UnionType):  # `int | None`: no value on the command line means None
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if hint is Path:
        return {"type": str, "metavar": name.upper()}  # not Path: an empty text would become the current folder
    return {"type": _converter(hint), "metavar": {int: "N", float: "X"}.get(hint, name.upper())}


def _converter(kind: type) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            expected = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'") from None

    return convert


def _with_underscores(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
