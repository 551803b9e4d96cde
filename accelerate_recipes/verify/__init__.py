"""`accelerate-recipes verify`: does a recipe give one result under every config?"""

import math
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.catalog import count_gpus, find_config, mapping_in, runs_here
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.doctor.config import is_count
from accelerate_recipes.matrix import CONFIGS, SIZES
from accelerate_recipes.paths import check_file, check_folder
from accelerate_recipes.verify.causes import likely_cause
from accelerate_recipes.verify.certificate import Row, Table, write
from accelerate_recipes.verify.compare import Difference, Key, compare, noise_floor, of_all_steps
from accelerate_recipes.verify.runs import Finished, Launch, recording

EVIDENCE = "accelerate_recipes.verify.causes:evidence"


def run(
    script: Path,
    flags: list[str],
    steps: int,
    configs: list[str] | None,
    output: Path | None,
    accelerate: bool,
    as_json: bool,
    splits: bool = False,
) -> int:
    """Verifies a script, prints the table and writes the certificate.

    Args:
        script: a recipe; with `accelerate`, a script on plain Accelerate.
        flags: its flags.
        steps: optimizer steps of each run.
        configs: names or paths of configs; None: all that this machine runs.
        output: the folder of the certificate; None: verified/<script>.
        accelerate: watch a script on plain Accelerate from outside.
        as_json: print the certificate as JSON instead of the table.
        splits: with `accelerate`, loaders divide each batch.

    Returns:
        the exit code: 0 if all runs that are supported are the same, otherwise 1.

    Raises:
        UsageError: no such script or config, or the recipe does not run in one process.
    """
    check_folder(output or Path("verified") / script.stem, "--output" if output else "")
    if accelerate:
        from accelerate_recipes.verify.watch import verify_watched

        return verify_watched(script, flags, steps, output, as_json, splits)
    check_file(script, "", "use the path of a recipe")
    folder = output or Path("verified") / script.stem
    chosen, table = chosen_configs(configs), Table(sys.stderr if as_json else sys.stdout)
    with TemporaryDirectory(prefix="verify_") as scratch:
        verification = _Verification(script, flags, steps, Path(scratch), table)
        verification.verify_all(chosen)
        cause, reference = verification.cause(), verification.record()
    write(folder, script, flags, steps, table.rows, cause, as_json, configs, verification.gap, reference)
    return int(any(row.is_bad for row in table.rows))


def chosen_configs(names: list[str] | None) -> list[Path]:
    """The configs of these names or paths; None: all. Raises UsageError for one that is none."""
    if names:
        paths = [find_config(name) for name in names]
        for path in paths:
            if not is_count(mapping_in(path).get("num_processes")):
                raise UsageError(f"{path} has no num_processes above 0, which verify needs: add it to the file")
        return paths
    return [find_config(name) for name in CONFIGS]


@dataclass
class _Verification:
    """The runs of one script."""

    script: Path
    flags: list[str]
    steps: int
    scratch: Path
    table: Table
    first_difference: Difference | None = None  # the first run that is not the same
    floors: list[dict[Key, float]] = field(default_factory=list)  # of one process with other micro-batches
    found_by_check: str | None = None  # the likely cause that a run named
    gap: str | None = "no run had other micro-batches"

    def verify_all(self, configs: list[Path]) -> None:
        """Makes all runs, and adds a row to the table for each."""
        self.table.begin([path.stem for path in configs])
        single = Launch(self.script, find_config("single"), self._all_flags())
        self.reference = reference = single.run(self.scratch / "single")
        if not reference.is_done:
            raise UsageError(f"{self.script} does not run in one process: {reference.refusal or reference.failure}")
        self.table.add(Row("single", reference.card["num_processes"], note="the reference"))
        if draws := reference.card.get("draws"):
            single = self._with_one_micro_batch_size(single, configs)
        else:
            for parts in (2, 8):
                self._other_micro_batches("single", single, self.scratch / f"in_{parts}", parts)
        in_bf16 = replace(single, options=["--mixed_precision", "bf16"])
        divided = None
        for config in configs:
            launch, settings = Launch(self.script, config, self._all_flags(config)), mapping_in(config)
            if (here := runs_here(settings, count_gpus())).startswith("needs"):
                self.table.add(Row(config.stem, settings["num_processes"], note=f"not run: {here}"))
                continue
            expected = self._bf16(in_bf16) if settings["mixed_precision"] == "bf16" else self.reference
            same = self._add(config.stem, launch.run(self.scratch / config.stem), expected)
            if same and divided is None and settings["num_processes"] > 1:
                divided = launch
                if not draws and not config.stem.startswith("pipeline"):
                    self._other_micro_batches(config.stem, launch, self.scratch / "accumulated", parts=4)
        self._kill(divided or single)

    def cause(self) -> str | None:
        """The likely cause of the first difference; None if there is no difference."""
        if self.first_difference is None:
            return self.found_by_check
        return likely_cause(at_fit(self.script, self.flags, EVIDENCE), self.first_difference)

    def _other_micro_batches(self, name: str, launch: Launch, folder: Path, parts: int) -> None:
        """Runs with another `--micro_batch_size` than the run that `launch` made, if possible in so many parts."""
        card = Finished(self.scratch / launch.config.stem).card
        size, share = card["micro_batch_size"], card["micro_batch_size"] * card["gradient_accumulation_steps"]
        others = [other for other in range(1, share + 1) if share % other == 0 and other != size]
        if not others:
            return
        other = min(others, key=lambda other: (abs(share // other - parts), other))
        run = launch.run(folder, "--micro_batch_size", str(other))
        if name == "single" and run.is_done:
            self.floors.append(noise_floor(run.trace, self.reference.trace))
        self._add(f"{name}, {share // other} accumulated", run, self.reference)
        self.gap = None

    def _with_one_micro_batch_size(self, single: Launch, configs: list[Path]) -> Launch:
        """Makes the reference again, with a `--micro_batch_size` that all configs can take: the model draws random
        numbers, which depend on it."""
        most = math.lcm(*(mapping_in(config)["num_processes"] for config in configs))
        micro = max(1, self.reference.card["config"]["batch_size"] // most)
        self.flags = [*self.flags, "--micro_batch_size", str(micro)]
        self.gap = (
            f"random numbers depend on --micro_batch_size: all runs had {micro}; those that a dataset draws do not"
        )
        single = replace(single, flags=self._all_flags())
        shutil.rmtree(self.scratch / "single")
        self.reference = single.run(self.scratch / "single")
        return single

    def record(self) -> dict[str, Any]:
        """What the certificate keeps of one process, for `--against`."""
        return {"flags": self._all_flags(), **self.reference.trace.to_record()}

    def _all_flags(self, config: Path | None = None) -> list[str]:
        return [*self.flags, *recording(self.steps), *(SIZES.get(config.stem, []) if config is not None else [])]

    def _bf16(self, launch: Launch) -> Finished:
        """The reference for configs in bf16: one process in bf16. The first call runs it."""
        folder = self.scratch / "single_bf16"
        return Finished(folder) if folder.exists() else launch.run(folder)

    def _kill(self, launch: Launch) -> None:
        """Kills a run under this config and resumes it; the reference is the run that was not killed."""
        undisturbed = Finished(self.scratch / launch.config.stem)
        try:
            step, resumed = launch.run_killed(self.scratch / "killed", self.steps)
        except UsageError as error:  # it must not cost the rows before
            self.table.add(Row(f"{launch.config.stem}, killed", None, note=f"not killed: {error}"))
            return
        self._add(f"{launch.config.stem}, killed at step {step}, resumed", resumed, undisturbed)

    def _add(self, name: str, run: Finished, reference: Finished) -> bool:
        if not run.is_done:
            self.table.add(row := Row(name, None, refusal=run.refusal, failure=run.failure))
            self.found_by_check = self.found_by_check or (run.cause if row.found_by_check else None)
            return False
        floor = of_all_steps(*self.floors) if reference is self.reference else None
        difference = compare(run.trace, reference.trace, floor)
        if not difference.is_same and self.first_difference is None:
            self.first_difference = difference
        checked = run.card.get("checked_steps", 0)
        self.table.add(Row(name, run.card["num_processes"], difference=difference, checked_steps=checked))
        return difference.is_same


__all__ = ["chosen_configs", "run"]
