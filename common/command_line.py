"""The command line of a recipe: its flags, and a file of flags, which may be the run card of an earlier run."""

import argparse
import dataclasses
import difflib
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from .config import RunConfig, check_value, declaration, script_name
from .errors import UsageError

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
    in_file = parser.parse_file(given["flags"]) if given.get("flags") else {}
    config = config_class(**(in_file | given))
    config.validate()
    return config


# The groups of --help; a recipe's own flags come first.
GROUPS = {
    "data": ("data", "num_workers"),
    "optimisation": (
        *("epochs", "max_steps", "batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "lr_schedule"),
        *("weight_decay", "max_grad_norm", "ema_decay", "early_stopping_patience", "seed"),
    ),
    "saving": (
        *("output_dir", "overwrite_output_dir", "save_every", "keep_checkpoints", "async_save", "stop_on_save_error"),
        *("resume_from_checkpoint", "metric_for_best_model", "export_dtype"),
    ),
    "records": (
        *("log_every", "eval_every", "evaluate_only", "save_predictions"),
        *("report_to", "profile", "flags"),
    ),
    "machine": (
        "pipeline_stages",
        "compile",
        "deterministic",
        "tf32",
        "check_steps",
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
# Entries of a run card that `--flags` leaves out: they belong to one run and do not change what it computes. Older run
# cards have "repeat".
NOT_REPEATED = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "evaluate_only"),
    *("repeat", "flags"),
)


def _entries(path: str) -> list[tuple[str, yaml.Node]]:
    """(key, value) of each flag in a YAML file, or in a run card, whose JSON is YAML, too. Raises UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        with suppress(ValueError):  # JSON's escapes of an emoji are not YAML's
            text = json.dumps(json.loads(text), ensure_ascii=False)
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror}): type the path of a YAML file") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"no YAML{place}: expected one flag a line, such as batch_size: 128") from None
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise UsageError("expected one flag a line, such as batch_size: 128")
    entries = {key.value: value for key, value in root.value}
    if isinstance(config := entries.get("config"), yaml.MappingNode):
        return [(key.value, value) for key, value in config.value if key.value not in NOT_REPEATED]
    return [(key.value, value) for key, value in root.value]


class _Parser(argparse.ArgumentParser):
    def __init__(self, config_class: type[RunConfig]):
        self.config_class = config_class
        super().__init__(
            prog=f"{script_name()}.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        groups = {title: self.add_argument_group(title) for title in ("this recipe", *GROUPS)}
        group_of = {name: groups[title] for title, names in GROUPS.items() for name in names}
        for field in dataclasses.fields(config_class):
            hint, metadata = declaration(config_class, field.name)
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
        """The flags in a file. Raises UsageError with the name of the file."""
        words: dict[str, str] = {}
        try:
            for key, node in _entries(path):
                name = key.replace("-", "_")
                if name in words:
                    raise UsageError(f"{name} is in the file twice: remove one")
                words[name] = self._word(name, node)
            values = self.parse([word for word in words.values() if word])
            for name, value in values.items():
                check_value(self.config_class, name, value)
        except UsageError as error:
            raise UsageError(f"--flags {path}: {error}") from None
        return values

    def _word(self, name: str, node: yaml.Node) -> str:
        """An entry of a YAML file as on the command line. The text is the file's: YAML would read 1e-3 as text and 010
        as 8. Empty for null."""
        if name in ("flags", "help"):
            self.error(f"--{name} belongs on the command line")
        if name not in {field.name for field in dataclasses.fields(self.config_class)}:
            self._refuse(f"--{name}")
        if not isinstance(node, yaml.ScalarNode):
            self.error(f"--{name}: expected one value, got a list or a mapping")
        if node.tag == "tag:yaml.org,2002:null":
            return ""
        if declaration(self.config_class, name)[0] is not bool:
            return f"--{name}={node.value}"
        if node.tag != "tag:yaml.org,2002:bool":
            self.error(f"--{name}: expected true or false, got '{node.value}'")
        return f"--{name}" if yaml.SafeLoader.bool_values[node.value.lower()] else f"--no_{name}"

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
