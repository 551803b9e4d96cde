"""Promise: forked runs do the same as launched runs. Each config and each recipe is launched here."""

import json
from pathlib import Path

import pytest

from accelerate_recipes.matrix import PIPELINES
from support.launching import fork, launch
from support.recipes import BF16_CONFIGS, FLAGS, FLOAT32_CONFIGS, MISFIT, RECIPES
from support.runs import Run, assert_equal_to_the_last_bit, refused

LOCAL_CONFIGS = [*FLOAT32_CONFIGS, *BF16_CONFIGS]
RECIPE_OF = {"single": "mnist cnn", "ddp": "linear regression"}
RECIPE_OF |= dict.fromkeys([*PIPELINES, "sequence_parallel", "fsdp2_sequence_parallel"], "transformer")
RECIPE_OF |= {"fsdp2_expert_parallel": "experts"}
# The other configs differ from it in variables alone, and a test below launches each config to compare them.
LAUNCHED = ("deepspeed_zero2",)
OTHERS = ("ddp", "ddp_bf16", "fsdp2", "hsdp", "tensor_parallel", "sequence_parallel", "pipeline_parallel")
# These differ in each run.
OWN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize(
    "config", [pytest.param(one, marks=[] if one in LAUNCHED else pytest.mark.full) for one in LOCAL_CONFIGS]
)
def test_forked_run_has_the_records_of_the_launched_one(tmp_path: Path, config: str) -> None:
    script, arguments = RECIPES[RECIPE_OF.get(config, "mnist mlp")]
    arguments += f" --max_steps 6 --eval_every 3{FLAGS.get(config, '')}"
    launched, forked = (start(tmp_path / start.__name__, config, script, arguments) for start in (launch, fork))
    assert_equal_to_the_last_bit(forked, launched)
    for name in ("config", "parallelism", "precision", "num_processes", "threads_per_process", "status"):
        expected = {**launched.card["config"], "output_dir": forked.card["config"]["output_dir"]}
        assert forked.card[name] == (expected if name == "config" else launched.card[name]), name


def given(run: Run) -> dict[str, dict]:
    """Returns {file of a process: its environment, arguments, folder and open files}."""
    return {path.name: json.loads(path.read_text()) for path in run.output_dir.glob("*.json")}


@pytest.mark.parametrize(
    "config",
    [pytest.param(one, marks=[] if one in (*LAUNCHED, *OTHERS) else pytest.mark.full) for one in LOCAL_CONFIGS],
)
def test_forked_processes_are_given_what_the_launched_ones_are(tmp_path: Path, config: str) -> None:
    launched, forked = (
        given(start(tmp_path / start.__name__ / "run", config, "tests/scripts/surroundings.py"))
        for start in (launch, fork)
    )
    assert launched.keys() == forked.keys()
    for process, ours in forked.items():
        theirs = launched[process]
        names = (ours["environment"].keys() | theirs["environment"].keys()) - OWN
        different = {name for name in names if ours["environment"].get(name) != theirs["environment"].get(name)}
        assert not different
        assert all(ours[name] == theirs[name] for name in ("files", "path", "process"))
        assert ours["arguments"][0] == theirs["arguments"][0]
    ports = {ours["environment"].get("MASTER_PORT") for ours in forked.values()}
    assert len(ports) == 1


def test_forked_process_draws_numbers_of_its_own(tmp_path: Path) -> None:
    """Fresh interpreters draw different numbers, too, until `start` seeds them."""
    script = tmp_path / "draws.py"
    script.write_text(
        "import os, pathlib, random, sys\n"
        "import numpy, torch\n"
        "drawn = [random.random(), numpy.random.rand(), float(torch.rand(()))]\n"
        "pathlib.Path(sys.argv[2] + os.environ['RANK']).write_text(' '.join(map(str, drawn)))\n"
    )
    fork(tmp_path / "run", "ddp", script)
    first, second = ((tmp_path / f"run{rank}").read_text().split() for rank in (0, 1))
    assert not set(first) & set(second)


def test_failure_ends_all_with_its_own_exit_code(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", MISFIT, "--case one_process", succeeds=False)
    assert run.exit_code == 2 and refused(run) == "error: this process alone has a problem"
    script = tmp_path / "waits.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(1000)\n")
    assert fork(tmp_path / "run", "ddp", script, succeeds=False).exit_code == 7


def test_server_has_one_thread_and_the_tests_know_it(tmp_path: Path) -> None:
    """A fork of a process with several threads may wait forever for a lock. support.preloaded checks it, too."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "parents = os.getppid()\n"
        "status = pathlib.Path(f'/proc/{parents}/status').read_text()\n"
        "server = status.split('PPid:')[1].split()[0]\n"
        "pathlib.Path(sys.argv[2]).write_text(str(len(list(pathlib.Path(f'/proc/{server}/task').iterdir()))))\n"
    )
    run = fork(tmp_path / "run", "single", script)
    assert run.output_dir.read_text() == "1"
