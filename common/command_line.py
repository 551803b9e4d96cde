"""The command line of a recipe: its flags."""

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from .config import RunConfig, declaration, script_name
from .environment import Environment, rank
from .errors import UsageError

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def parse(config_class: type[ConfigT], arguments: Sequence[str] | None = None) -> ConfigT:
    """Reads the command line, or these words instead of `sys.argv[1:]`, into a config. Flags are the fields of
    `config_class`; `--batch_size` and `--batch-size` are the same. Raises UsageError for an unknown flag, or a value of
    the wrong type or out of range; SystemExit with code 0 after `--help`."""
    config = config_class(**_Parser(config_class).parse(sys.argv[1:] if arguments is None else arguments))
    config.validate()
    return config


# The groups of --help after the recipe's own flags: {title: its first flag in RunConfig, which lists them in order}.
GROUPS = {
    "data": "data",
    "optimisation": "epochs",
    "saving": "output_dir",
    "records": "log_every",
    "machine": "pipeline_stages",
}
OF_A_SPLIT = re.compile("--(train|training|eval|valid|validation|dev|test)_(data|dataset|file|files|path|dir)")
OF_THE_LAUNCHER = (
    *("--config_file", "--machine_rank", "--main_process_ip", "--main_process_port", "--mixed_precision"),
    *("--num_machines", "--num_processes"),
)
OF_OLD_LAUNCHERS = "local_rank"


class _Parser(argparse.ArgumentParser):
    def __init__(self, config_class: type[RunConfig]):
        self.config_class = config_class
        super().__init__(
            prog=f"{script_name()}.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        own = group = self.add_argument_group("this recipe")
        titles = {name: title for title, name in GROUPS.items()}
        for field in dataclasses.fields(config_class):  # RunConfig's fields come first
            group = self.add_argument_group(titles[field.name]) if field.name in titles else group
            group = group if field.name in RunConfig.__dataclass_fields__ else own
            hint, metadata = declaration(config_class, field.name)
            help = metadata.get("help", "")
            if field.default not in (None, "") and hint is not bool:
                help += f" (default: {field.default})"
            elif hint is bool:
                help += f" (--no_{field.name} turns it off{'; off by default' * (not field.default)})"
                group.add_argument(f"--no_{field.name}", dest=field.name, action="store_false", help=argparse.SUPPRESS)
            group.add_argument(f"--{field.name}", **{"help": help.replace("%", "%%")} | _options(hint, field.name))
        if not hasattr(config_class, OF_OLD_LAUNCHERS):
            self.add_argument(f"--{OF_OLD_LAUNCHERS}", help=argparse.SUPPRESS)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        words = [re.sub("^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), each) for each in arguments]
        for word, following in zip(words, [*words[1:], "--"]):
            name, equals, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None and action.nargs == 0 and (equals or not following.startswith("-")):
                off = f"--no_{action.dest} turns it off"
                self.error(f"{name} takes no value, got '{value if equals else following}': remove the value; {off}")
        values, unknown = self.parse_known_args(words)
        for word in unknown:
            if (name := word.partition("=")[0]) in OF_THE_LAUNCHER:
                self.error(f"{name} belongs before the script: accelerate launch {name} ... {self.prog}")
            flags = [option for option in self._option_string_actions if option.startswith("--") and option != name]
            close = difflib.get_close_matches(name, flags, n=1)
            advice = f"did you mean {close[0]}?" if close else "--help lists them"
            if "--data" in flags and OF_A_SPLIT.fullmatch(name):
                advice = "put the files into a folder, as train.* and dev.*, and use --data FOLDER"
            self.error(f"{word}: no such flag; {advice}")
        if getattr(values, "help", False):
            # Every process gets the same command line; one of them prints.
            if rank() == 0:
                self.print_help()
            raise SystemExit(0)
        self._check_launcher(values)
        return vars(values)

    def _check_launcher(self, values: argparse.Namespace) -> None:
        """Accepts the flag that launchers such as deepspeed add, if their variables say the same. Raises UsageError if
        a launcher of several processes sets no variables: each process would train alone."""
        given = None if hasattr(self.config_class, OF_OLD_LAUNCHERS) else vars(values).pop(OF_OLD_LAUNCHERS, None)
        local_rank = Environment.read().local_rank
        if given is None or given == str(local_rank):
            return
        if given != "0":
            raise SystemExit(UsageError.exit_code)
        is_set = "LOCAL_RANK is not set" if local_rank is None else f"LOCAL_RANK is {local_rank}"
        self.error(
            f"--{OF_OLD_LAUNCHERS}={given} comes from an old launcher, but {is_set}: start with accelerate launch or "
            "torchrun, and remove it"
        )

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _options(hint: Any, name: str) -> dict[str, Any]:
    if isinstance(hint, types.UnionType):  # `int | None`: no value on the command line means None
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
        if hint is str and not name.endswith("_prompt"):  # an empty prompt is one, in place of the model's own
            return {"type": partial(_given, "a value"), "metavar": name.upper()}
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if hint is Path:  # which would turn "" into the current folder
        return {"type": lambda text: Path(_given("the path of a folder", text)), "metavar": name.upper()}
    return {"type": partial(_convert, hint), "metavar": {int: "N", float: "X"}.get(hint, name.upper())}


def _given(expected: str, text: str) -> str:
    if not text.strip():  # as from a variable of the shell that is not set
        raise argparse.ArgumentTypeError(f"expected {expected}, got nothing")
    return text


def _convert(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[kind]
        raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'") from None
