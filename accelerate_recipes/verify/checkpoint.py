"""`verify --checkpoint`: takes the next steps of a run from its checkpoint, and compares them with one process."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import count_gpus, mapping_in, runs_here
from accelerate_recipes.common.checkpoint.format import DamagedError
from accelerate_recipes.common.checkpoint.reader import Reader
from accelerate_recipes.common.checkpoint.source import COMMAND, CONFIGS, launch_option, open_source
from accelerate_recipes.common.errors import RunError, UsageError
from accelerate_recipes.common.records.output_dir import checkpoints
from accelerate_recipes.console import print_json
from accelerate_recipes.matrix import SIZES
from accelerate_recipes.paths import check_file
from accelerate_recipes.verify.certificate import Row
from accelerate_recipes.verify.runs import Finished, Launch, chosen_configs

# The checking run records each step in its own folder, and writes nothing else.
CHECKS = ["--check_steps", "2", "--log_every", "1", "--eval_every", str(10**9), "--save_every", "0"]
CHECKS += ["--report_to", "", "--no_overwrite_output_dir"]
NOT_CHECKED = "are not checked against one process "  # in the line of a run


@dataclass(frozen=True)
class Origin:
    """The command that started the run of a checkpoint. The checkpoint contains it."""

    script: str  # the file name of the recipe
    flags: list[str] = field(default_factory=list)  # after the script
    config: Path | None = None  # a copy of the config file; None without one
    options: list[str] = field(default_factory=list)  # of accelerate launch that change what the config says

    @classmethod
    def of(cls, content: dict[str, Any], script: Path, folder: Path) -> "Origin":
        """Reads a checkpoint's manifest. `script`: the recipe, if the manifest names none; `folder`: for its config."""
        archive = open_source(content["source"])
        words = shlex.split(archive.read(COMMAND).decode())
        at = next((at for at, word in enumerate(words) if at and word.endswith(".py")), len(words))
        name, *flags = words[at:] or [script.name]
        given = {option: launch_option(words[:at], option) for option in ("--num_processes", "--mixed_precision")}
        entry = f"{CONFIGS}/{Path(launch_option(words[:at], '--config_file') or '').name}"
        config = Path(archive.extract(entry, folder)) if entry in archive.namelist() else None
        return cls(Path(name).name, flags, config, [f"{option}={value}" for option, value in given.items() if value])

    @property
    def num_processes(self) -> int:
        """The number of processes of the run; 1 if the command does not say."""
        given = launch_option(self.options, "--num_processes")
        return int(given or (mapping_in(self.config)["num_processes"] if self.config else 1))

    def launch(self, script: Path, flags: list[str], config: Path) -> Launch:
        """The run under its own config, or another one."""
        if config.stem == (self.config and self.config.stem):
            own, options = self.flags, self.options if config is self.config else []
        else:
            sizes = ["--pipeline_stages", "1", "--expert_parallel", "1", *SIZES.get(config.stem, [])]
            own, options = [*self.flags, *sizes], []
        return Launch(script, config, [*own, *flags, *CHECKS], options)


def run(script: Path, flags: list[str], checkpoint: Path, configs: list[str] | None, as_json: bool) -> int:
    """Resumes a run in a separate folder, under each config, and ends it when its first steps are checked. Only reads
    the checkpoint and the run's folder. Returns the exit code: 0 if each config gives the result of one process, else
    1. Raises UsageError if recipe or checkpoint is missing, or nothing was checked. `flags`: more flags than the run's;
    `configs`: names or paths; None: the run's config, or all configs after a run in one process."""
    check_file(script, "", "use the path of a recipe")
    content = _opened(checkpoint)
    rows: list[Row] = []
    with TemporaryDirectory(prefix="verify_") as scratch:
        origin = Origin.of(content, script, Path(scratch))
        own = origin.config if origin.num_processes > 1 and not configs else None
        chosen = chosen_configs(configs) if own is None else [own]
        width = max(len(config.stem) for config in chosen)
        for number, config in enumerate(chosen):
            launch = origin.launch(script, flags, config)
            settings = mapping_in(config) | ({"num_processes": origin.num_processes} if config is own else {})
            if settings["num_processes"] == 1:
                raise UsageError(f"{config.stem} is one process itself: use another --config, such as ddp")
            if (here := runs_here(settings, count_gpus())).startswith("needs"):
                row, more = Row(config.stem, None, note=f"not run: {here}"), ""
            else:
                resumed = ["--resume_from_checkpoint", str(checkpoint.absolute())]
                finished = launch.run_until(_is_checked, Path(scratch) / str(number), *resumed)
                row, more = _row(config.stem, finished, checkpoint, origin, script)
            rows.append(row)
            if not as_json:
                print(f"{row.name.ljust(width)}  {row.verdict}{more}", flush=True)
    if not any(row.checked_steps or row.is_bad for row in rows):
        raise UsageError(f"nothing of {checkpoint} was checked ({rows[0].verdict}): use another --config")
    if as_json:
        facts = [{"config": row.name, "is_same": row.checked_steps > 0, "verdict": row.verdict} for row in rows]
        print_json({"checkpoint": str(checkpoint), "step": content["state"]["step"], "rows": facts})
    return int(any(row.is_bad for row in rows))


def _opened(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UsageError if there is none."""
    whole = checkpoint.absolute()
    around = [folder for folder in (checkpoint, whole.parent, whole.parent.parent) if (folder / "checkpoints").is_dir()]
    near = [path for folder in around for _, path in checkpoints(folder) if path.absolute() != whole]
    advice = f"use {near[-1]}" if near else "use the folder of one, such as outputs/mnist/checkpoints/step_00000100"
    if not checkpoint.is_dir():
        raise UsageError(f"--checkpoint {checkpoint}: no such folder; {advice}")
    try:
        return Reader(checkpoint).content
    except (DamagedError, RunError) as error:
        raise UsageError(f"--checkpoint {checkpoint} is not a complete checkpoint ({error}): {advice}") from None


def _is_checked(folder: Path) -> bool:
    """Whether a run has finished its check, or begins without one."""
    run = Finished(folder)
    checked = run.card.get("checked_steps")
    return checked is not None and (checked == 0 or run.last_step >= run.card["first_step"] + checked)


def _row(name: str, run: Finished, checkpoint: Path, origin: Origin, script: Path) -> tuple[Row, str]:
    """The row of a run, and the lines below it. Raises UsageError if every other config would end the same way."""
    if run.refusal is not None:
        row = Row(name, None, refusal=run.refusal)
        if not row.found_by_check and origin.script != script.name:
            raise UsageError(f"{checkpoint} is from {origin.script}, but {script.name} stops with: {run.refusal}")
        if not row.found_by_check and str(checkpoint) in run.refusal:
            raise UsageError(run.refusal)
        after = run.output.partition(run.refusal)[2].splitlines()[1:]
        below = [line for line in after if line.startswith("  ") and "--check_steps 0" not in line]
        return row, "".join(f"\n{line}" for line in below if row.found_by_check)
    if run.failure is not None:
        return Row(name, None, failure=run.failure), ""
    if reason := run.output.partition(NOT_CHECKED)[2].partition("\n")[0]:
        return Row(name, None, note=f"not checked {reason}"), ""
    first, num_checked = run.card["first_step"], run.card["checked_steps"]
    if run.last_step <= first:
        advice = f"use an earlier checkpoint, or train longer, with -- --max_steps {first + 2}"
        raise UsageError(f"{checkpoint} is at the end of its run, step {first}: {advice}")
    steps = f"steps {first + 1} and {first + 2}" if num_checked == 2 else f"step {first + 1}"
    note = f"same in {steps} ({run.card['parallelism']}, {run.card['num_processes']} processes)"
    return Row(name, run.card["num_processes"], note=note, checked_steps=num_checked), ""
