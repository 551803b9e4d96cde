"""The certificate: one row per run, printed as it is made, and written as JSON and Markdown."""

import hashlib
import json
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate_recipes import bundle
from accelerate_recipes.common.package import installed_versions
from accelerate_recipes.console import print_json
from accelerate_recipes.templates import render
from accelerate_recipes.verify.differences import Difference

COLUMNS = ("config", "processes", "loss", "gradient", "weights", "eval", "learning rate", "")
CHECKED = "does not give the result of one process"  # in the line of the parity check
_PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "deepspeed", "peft", "numpy", "pillow")


@dataclass(frozen=True)
class Row:
    name: str  # the config, and what was done to the run
    processes: int | None  # their number; None if the run did not start
    difference: Difference | None = None  # from the reference
    refusal: str | None = None  # the line with which the recipe refused the config
    failure: str | None = None  # why the run failed
    note: str = ""  # additional information
    checked_steps: int = 0  # how many of its first steps the run itself compared with one process

    @property
    def found_by_check(self) -> bool:
        """Whether the run ended itself, because its own check found a difference from one process."""
        return self.refusal is not None and CHECKED in self.refusal

    @property
    def is_bad(self) -> bool:
        """Whether the run contradicts a single result: it differs, or it failed. An unsupported run does not."""
        differs = self.difference is not None and not self.difference.is_same
        return differs or self.found_by_check or self.failure is not None

    @property
    def verdict(self) -> str:
        """The text of the last column."""
        if self.refusal is not None:
            return f"{'DIFFERS' if self.found_by_check else 'not supported'}: {self.refusal}"
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        if (found := self.difference) is None:
            return self.note
        if found.is_same:
            return "bit for bit" if found.is_exact else "same, to rounding errors" if found.is_noise else "same"
        places = [f"from step {found.first_step}"] * (found.first_step is not None)
        places += [f"in {found.tensor}"] * (found.tensor is not None)
        return f"DIFFERS {', '.join(places or ['in the evaluation' if found.evaluation else 'in the gradient'])}"

    @property
    def cells(self) -> list[str]:
        numbers = ["–"] * 5
        if (found := self.difference) is not None:
            numbers = [_number(value) for value in (found.loss, found.gradient, found.weights, found.evaluation)]
            numbers.append("equal" if found.learning_rate == 0 else _number(found.learning_rate))
        return [self.name, "–" if self.processes is None else str(self.processes), *numbers, self.verdict]


@dataclass
class Certificate:
    """The runs of a script: prints a row after each run, since a run takes seconds, and writes all rows at the end."""

    folder: Path  # from the command, as are the fields down to `configs`
    script: Path
    flags: list[str]
    steps: int
    as_json: bool
    configs: list[str] | None = None
    rows: list[Row] = field(default_factory=list)
    width: int = 0  # of the first column

    def begin(self, names: list[str]) -> None:
        """Prints the heading."""
        self.width = max(len(name) for name in ("single", *names)) + len(", killed at step 99, resumed")
        self._print(list(COLUMNS))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._print(row.cells)

    def _print(self, cells: list[str]) -> None:
        name, processes, *numbers, verdict = cells
        numbers = [cell.rjust(13 if cell in COLUMNS[6:] else 9) for cell in numbers]
        line = "  ".join([name.ljust(self.width), processes.rjust(9), *numbers, verdict]).rstrip()
        print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def write(self, cause: str | None, gap: str | None = None, reference: dict[str, Any] | None = None) -> int:
        """Writes certificate.json and certificate.md, and prints the result. Returns the exit code: 0 if all runs that
        are supported are the same, else 1. `cause`: the likely cause of a difference; `gap`: what these runs cannot
        show; `reference`: the losses of one process, for `--against`."""
        num_bad = sum(row.is_bad for row in self.rows)
        content: dict[str, Any] = {
            "script": str(self.script),
            "sha256": hashlib.sha256(self.script.read_bytes()).hexdigest(),
            "configs": self.configs,
            "flags": self.flags,
            "steps": self.steps,
            "is_same": not num_bad,
            "cause": cause,
            "gap": gap,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
            "reference": reference,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (self.folder / "certificate.json").write_text(f"{text}\n", encoding="utf-8")
        (self.folder / "certificate.md").write_text(_markdown(content, self.rows), encoding="utf-8")
        if self.as_json:
            print_json(content)
            return int(num_bad > 0)
        of_all = f"{num_bad} of {len(self.rows)} runs are not the same"
        if num_bad:
            print(f"\n{of_all}. Likely cause: {cause or 'see the error of the failed run'}")
        else:
            print("\nOne result." if gap is None else f"\nThe same, but {gap}.")
        print(f"The certificate is in {self.folder}/certificate.md and certificate.json")
        return int(num_bad > 0)


def _markdown(content: dict[str, Any], rows: list[Row]) -> str:
    words = ["accelerate-recipes", "verify", content["script"], "--steps", str(content["steps"])]
    words += [word for config in content["configs"] or () for word in ("--config", config)]
    command = shlex.join(words)
    command += f" -- {shlex.join(content['flags'])}" if content["flags"] else ""
    of_several = [row for row in rows if row.difference is not None and (row.processes or 0) > 1]
    return render(
        "certificate.md",
        title="Not one result" if not content["is_same"] else "One result" if content["gap"] is None else "The same",
        name=Path(content["script"]).name,
        command=command,
        content=content,
        columns=COLUMNS,
        rows=[[cell.replace("|", "\\|") for cell in row.cells] for row in rows],
        are_checked=all(row.checked_steps for row in of_several),
    )


def versions() -> dict[str, str]:
    """{name: version} of this tool, Python and the packages that a result depends on."""
    return {"accelerate-recipes": bundle.VERSION, "python": platform.python_version()} | installed_versions(*_PACKAGES)


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"
