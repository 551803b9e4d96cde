"""Flags and output that commands share: wrapped text on a terminal, plain lines in a pipe, JSON on request."""

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Flags = Annotated[list[str] | None, typer.Argument(help="after --: flags for the recipe")]


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: with colours and wrapped cells on a terminal, one line per row in a pipe."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, markup=False).print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def print_entry(entry: Mapping[str, str]) -> None:
    """Prints the "name" of an entry, and below it the other values, each after its key."""
    name, *values = entry.items()
    width = max(len(key) for key, _ in values)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    print(name[1])
    for key, value in values:
        head = f"  {key.replace('_', ' ').ljust(width)}  "
        is_command = key == "command"  # a command must stay one line
        lines = [value] if is_command else textwrap.wrap(value, max(20, columns - len(head)))
        print(head + f"\n{' ' * len(head)}".join(lines))
    print()
