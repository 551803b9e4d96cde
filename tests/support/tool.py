"""Runs `accelerate-recipes` in this process."""

import sys

import pytest

from accelerate_recipes.cli import main


def tool(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["accelerate-recipes", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
