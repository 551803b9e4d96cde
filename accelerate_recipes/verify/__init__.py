"""`accelerate-recipes verify`: does a recipe give one result under every config?"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from accelerate_recipes import bundle
from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.catalog import count_gpus, find_config, runs_here
from accelerate_recipes.errors import UsageError
from accelerate_recipes.verify.causes import likely_cause
from accelerate_recipes.verify.certificate import Row, Table, write
from accelerate_recipes.verify.compare import Difference, compare
from accelerate_recipes.verify.runs import Finished, Launch

PIPELINE = ["--pipeline_stages", "2"]  # the number of stages is no setting of the config file
EVIDENCE = "accelerate_recipes.verify.causes:evidence"


def run(
    script: Path,
    flags: list[str],
    steps: int,
    configs: list[str] | None,
    output: Path | None,
    accelerate: bool,
    as_json: bool,
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

    Returns:
        the exit code: 0 if all runs that were not refused are the same, otherwise 1.

    Raises:
        UsageError: no such script or config, or the recipe does not run in one process.
    """
    if not script.is_file():
        raise UsageError(f"{script}: no such file; type the path of a recipe")
    if accelerate:
        from accelerate_recipes.verify.watch import verify_watched

        return verify_watched(script, flags, steps, output, as_json)
    folder = output or Path("verified") / script.stem
    table = Table(sys.stderr if as_json else sys.stdout)
    with TemporaryDirectory(prefix="verify_") as scratch:
        verification = _Verification(script, flags, steps, Path(scratch), table)
        verification.verify_all(_chosen(configs))
        cause = verification.cause()
    write(folder, script, flags, steps, table.rows, cause, as_json)
    return int(any(row.is_bad for row in table.rows))


def _chosen(names: list[str] | None) -> list[Path]:
    """The configs to verify under, without single.yaml: the reference is one process anyway."""
    if names:
        return [find_config(name) for name in names]
    return [path for path in bundle.configs() if path.stem != "single" and not path.stem.startswith("multi_node")]


@dataclass
class _Verification:
    """The runs of one script."""

    script: Path
    flags: list[str]
    steps: int
    scratch: Path
    table: Table
    first_difference: Difference | None = None  # the first run that is not the same

    def verify_all(self, configs: list[Path]) -> None:
        """Makes all runs, and adds a row to the table for each."""
        self.table.begin([path.stem for path in configs])
        single = Launch(self.script, find_config("single"), self._all_flags())
        reference = single.run(self.scratch / "single")
        if not reference.is_done:
            raise UsageError(f"{self.script} does not run in one process: {reference.refusal or reference.failure}")
        self.reference = reference
        self.table.add(Row("single", reference.card["num_processes"], note="the reference"))
        samples = reference.card["config"]["batch_size"]
        if samples % 2 == 0:
            half = ["--micro_batch_size", str(samples // 2)]
            self._compare("single, 2 accumulated", single, self.scratch / "half", half)
        in_bf16 = replace(single, options=["--mixed_precision", "bf16"])
        divided = None
        for config in configs:
            launch = Launch(self.script, config, self._all_flags(config))
            settings = yaml.safe_load(config.read_text(encoding="utf-8"))
            here = runs_here(settings, count_gpus())
            if here.startswith("needs"):
                self.table.add(Row(config.stem, settings["num_processes"], note=f"not run: {here}"))
                continue
            expected = self._bf16(in_bf16) if settings["mixed_precision"] == "bf16" else reference
            same = self._compare(config.stem, launch, self.scratch / config.stem, [], expected)
            if same and divided is None and settings["num_processes"] > 1:
                divided = launch
                parts = settings["num_processes"] * 4
                if samples % parts == 0 and not config.stem.startswith("pipeline"):
                    few = ["--micro_batch_size", str(samples // parts)]
                    self._compare(f"{config.stem}, 4 accumulated", launch, self.scratch / "accumulated", few)
        self._kill(divided or single)

    def cause(self) -> str | None:
        """The likely cause of the first difference; None if there is no difference."""
        if self.first_difference is None:
            return None
        return likely_cause(at_fit(self.script, self.flags, EVIDENCE), self.first_difference)

    def _all_flags(self, config: Path | None = None) -> list[str]:
        records = ["--max_steps", str(self.steps), "--log_every", "1", "--eval_every", str(max(1, self.steps // 2))]
        return [*self.flags, *records, *(PIPELINE if config is not None and config.stem.startswith("pipeline") else [])]

    def _bf16(self, launch: Launch) -> Finished:
        """The reference for configs in bf16: one process in bf16. The first call runs it."""
        folder = self.scratch / "single_bf16"
        return Finished(folder) if folder.exists() else launch.run(folder)

    def _compare(
        self, name: str, launch: Launch, folder: Path, flags: list[str], reference: Finished | None = None
    ) -> bool:
        run = launch.run(folder, *flags)
        return self._add(name, run, reference or self.reference)

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
            self.table.add(Row(name, None, refusal=run.refusal, failure=run.failure))
            return False
        difference = compare(run, reference)
        if not difference.is_same and self.first_difference is None:
            self.first_difference = difference
        self.table.add(Row(name, run.card["num_processes"], difference=difference))
        return difference.is_same


__all__ = ["run"]
