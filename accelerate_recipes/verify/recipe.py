"""Verifies a recipe: runs it in one process and under each config, and compares the runs."""

import math
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate_recipes.catalog import count_gpus, find_config, mapping_in, runs_here
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.matrix import SIZES
from accelerate_recipes.verify.causes import likely_cause
from accelerate_recipes.verify.certificate import Certificate, Row
from accelerate_recipes.verify.differences import Difference, Point, compare, noise_floor, of_all_steps
from accelerate_recipes.verify.runs import Finished, Launch, chosen_configs, recording


def verify_recipe(
    script: Path, flags: list[str], steps: int, configs: list[str] | None, folder: Path, as_json: bool
) -> int:
    """Runs a recipe under configs, and writes the certificate into a folder. Returns the exit code. Raises UsageError
    if a config does not exist, or if the recipe does not run in one process."""
    chosen, certificate = chosen_configs(configs), Certificate(folder, script, flags, steps, as_json, configs)
    with TemporaryDirectory(prefix="verify_") as scratch:
        verification = _Verification(flags, Path(scratch), certificate)
        verification.verify_all(chosen)
        kept = {"flags": verification.all_flags(), **verification.reference.trace.to_record()}  # for `--against`
        return certificate.write(verification.cause(), verification.gap, kept)


@dataclass
class _Verification:
    flags: list[str]
    scratch: Path
    certificate: Certificate
    first_difference: Difference | None = None  # the first run that is not the same
    floors: list[dict[Point, float]] = field(default_factory=list)  # of one process with different micro-batches
    found_by_check: str | None = None  # the likely cause that a run named
    said: list[str] = field(default_factory=list)  # lines in which runs say what their results depend on
    gap: str | None = "no run had different micro-batches"

    def verify_all(self, configs: list[Path]) -> None:
        """Makes all runs, and adds a row to the table for each. "single" is the reference."""
        configs = [*{path.stem: path for path in configs if path.stem != "single"}.values()]
        self.certificate.begin([path.stem for path in configs])
        single = Launch(self.certificate.script, find_config("single"), self.all_flags())
        self.reference = run = single.run(self.scratch / "single")
        if not run.is_done:
            raise UsageError(f"{self.certificate.script} fails on one process: {run.refusal or run.failure}")
        self.certificate.add(Row("single", run.card["num_processes"], note="the reference"))
        if draws := run.card.get("draws"):
            single = self._with_one_micro_batch_size(single, configs)
        else:
            for parts in (2, 8):
                self._other_micro_batches("single", single, self.scratch / f"in_{parts}", parts)
        in_bf16 = replace(single, options=["--mixed_precision", "bf16"])
        divided = None
        for config in configs:
            launch, settings = Launch(self.certificate.script, config, self.all_flags(config)), mapping_in(config)
            if (here := runs_here(settings, count_gpus())).startswith("needs"):
                self.certificate.add(Row(config.stem, settings["num_processes"], note=f"not run: {here}"))
                continue
            expected = self.reference
            if settings["mixed_precision"] == "bf16":
                folder = self.scratch / "single_bf16"  # one process in bf16
                expected = Finished(folder) if folder.exists() else in_bf16.run(folder)
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
        return likely_cause(self.first_difference, self.found_by_check, self.said)

    def _other_micro_batches(self, name: str, launch: Launch, folder: Path, parts: int) -> None:
        """Repeats the run of `launch` with a different `--micro_batch_size`, if possible in `parts` parts."""
        card = Finished(self.scratch / launch.config.stem).card
        size, share = card["micro_batch_size"], card["micro_batch_size"] * card["gradient_accumulation_steps"]
        if not (others := [other for other in range(1, share + 1) if share % other == 0 and other != size]):
            return
        other = min(others, key=lambda other: (abs(share // other - parts), other))
        run = launch.run(folder, "--micro_batch_size", str(other))
        if name == "single" and run.is_done:
            self.floors.append(noise_floor(run.trace, self.reference.trace))
        self._add(f"{name}, {share // other} accumulated", run, self.reference)
        self.gap = None

    def _with_one_micro_batch_size(self, single: Launch, configs: list[Path]) -> Launch:
        """Makes the reference again, with a `--micro_batch_size` that all configs take: random numbers depend on it."""
        most = math.lcm(*(mapping_in(config)["num_processes"] for config in configs))
        micro = max(1, self.reference.card["config"]["batch_size"] // most)
        self.flags = [*self.flags, "--micro_batch_size", str(micro)]
        self.gap = f"random numbers depend on --micro_batch_size, except in a dataset: all runs had {micro}"
        single = replace(single, flags=self.all_flags())
        shutil.rmtree(self.scratch / "single")
        self.reference = single.run(self.scratch / "single")
        return single

    def all_flags(self, config: Path | None = None) -> list[str]:
        """The flags of a run under a config; None: of one process."""
        sizes = SIZES.get(config.stem, []) if config is not None else []
        return [*self.flags, *recording(self.certificate.steps), *sizes]

    def _kill(self, launch: Launch) -> None:
        """Kills a run under this config and resumes it; the reference is the run that was not killed."""
        undisturbed = Finished(self.scratch / launch.config.stem)
        try:
            step, resumed = launch.run_killed(self.scratch / "killed", self.certificate.steps)
        except UsageError as error:  # the earlier rows must not be lost
            self.certificate.add(Row(f"{launch.config.stem}, killed", None, note=f"not killed: {error}"))
            return
        self._add(f"{launch.config.stem}, killed at step {step}, resumed", resumed, undisturbed)

    def _add(self, name: str, run: Finished, reference: Finished) -> bool:
        self.said += re.findall("^.*: the result depends on .*$", run.output, re.MULTILINE)
        if not run.is_done:
            self.certificate.add(row := Row(name, None, refusal=run.refusal, failure=run.failure))
            self.found_by_check = self.found_by_check or (run.cause if row.found_by_check else None)
            return False
        floor = of_all_steps(*self.floors) if reference is self.reference else None
        difference = compare(run.trace, reference.trace, floor)
        if not difference.is_same and self.first_difference is None:
            self.first_difference = difference
            if run.card["precision"] == "bf16" and "DeepSpeed" in run.card["parallelism"]:
                self.said.insert(0, "DeepSpeed's bf16 rounds at different points than one process with autocast")
        checked = run.card.get("checked_steps", 0)
        self.certificate.add(Row(name, run.card["num_processes"], difference=difference, checked_steps=checked))
        return difference.is_same
