"""For the tests of a project: does a script give one result under a config?"""

import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate_recipes.catalog import find_config
from accelerate_recipes.matrix import SIZES
from accelerate_recipes.verify.certificate import Row
from accelerate_recipes.verify.differences import compare, noise_floor, of_all_steps
from accelerate_recipes.verify.runs import Finished, Launch, recording

ONE_MACHINE = ["--num_machines", "1", "--machine_rank", "0", "--rdzv_backend", "static"]


def one_result(script: Path, config: Path, flags: str = "", steps: int = 20) -> None:
    """Trains under a config and in one process: losses, learning rates, evaluations and weights must be the same.

    Uses the tolerances of `accelerate-recipes verify`: 1e-5 in float32. Both runs have the same micro-batch, because
    dropout depends on it. The processes of the config run on this machine. `flags`: of the recipe, under this config;
    `steps`: of the optimizer. Raises AssertionError, with the place or cause, if the runs differ or one did not end."""
    words = [*recording(steps), *shlex.split(flags)]
    sizes = "|".join(size[0].replace("_", "[_-]") for size in SIZES.values())  # how a config divides the model
    alone = [*recording(steps), *shlex.split(re.sub(rf"({sizes})[ =]\d+", "", flags))]
    with TemporaryDirectory(prefix="one_result_") as scratch:
        run = _done(Launch(script, config, words, ONE_MACHINE), Path(scratch) / "run")
        precision = ["--mixed_precision", "bf16"] if run.card["precision"] == "bf16" else []
        single, micro_batch = find_config("single"), ["--micro_batch_size", str(run.card["micro_batch_size"])]
        one = _done(Launch(script, single, alone + micro_batch, precision), Path(scratch) / "one")
        difference = compare(run.trace, one.trace)
        if not difference.is_same:  # how much does rounding alone change?
            other = _done(Launch(script, single, alone, precision), Path(scratch) / "other")
            difference = compare(run.trace, one.trace, of_all_steps(noise_floor(other.trace, one.trace)))
        assert difference.is_same, f"{config.name}: {Row(config.stem, None, difference).verdict}"


def _done(launch: Launch, folder: Path) -> Finished:
    run = launch.run(folder)
    assert run.is_done, f"{launch.config.name}: {run.refusal or run.failure}"
    return run
