"""The command `accelerate-recipes`. Each subcommand is a function; its annotations define the flags.

A subcommand imports its modules when it runs, so that the others start fast.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer

from accelerate_recipes.catalog import show
from accelerate_recipes.common.errors import RunError
from accelerate_recipes.common.output_streams import Output
from accelerate_recipes.data import data
from accelerate_recipes.doctor import check
from accelerate_recipes.export import export
from accelerate_recipes.plan import plan
from accelerate_recipes.project import make
from accelerate_recipes.push import push
from accelerate_recipes.report import write
from accelerate_recipes.verify import verify

COMMANDS: dict[str, Callable[..., Any]] = {
    "list": show,
    "new": make,
    "data": data,
    "verify": verify,
    "doctor": check,
    "plan": plan,
    "push": push,
    "export": export,
    "report": write,
}
app = typer.Typer(
    name="accelerate-recipes",
    help="Recipes for Accelerate: find one, copy it, prove that its result does not depend on the config.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("-", "_"),  # Accelerate and the recipes write underscores
    },
)
for name, function in COMMANDS.items():
    app.command(name)(function)
_Misuse: Any = typer.BadParameter.__mro__[1]  # click's UsageError; newer versions of typer contain a copy


def main() -> None:
    """Runs the command line; a command returns its exit code. A mistake ends with one line and exit code 2."""
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    try:
        sys.exit(app(prog_name="accelerate-recipes", standalone_mode=False))
    except _Misuse as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(_refused(error.format_message()))
        command = error.ctx.command_path if error.ctx else "accelerate-recipes"
        takes_flags = error.ctx and any(each.name == "flags" for each in error.ctx.command.params)
        own = "put flags of the recipe after --, or " if takes_flags and type(error).__name__ == "NoSuchOption" else ""
        sys.exit(_refused(f"{error.format_message().rstrip('.')}: {own}run {command} --help"))
    except RunError as error:
        _refused(str(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)


def _refused(line: str) -> int:
    print(line, file=sys.stderr)
    return 2
