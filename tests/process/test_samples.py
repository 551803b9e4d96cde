"""Promise: the samples of a step depend only on the seed and the step, and evaluation counts each sample once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import CONFIGS, accelerate_forked, fork
from support.recipes import MNIST, SAME_SAMPLES
from support.runs import ROOT, Run, largest_difference, weight_distance

BATCH_SIZE, NUM_STEPS, NUM_SAMPLES = 16, 7, 50  # 3 steps an epoch, 2 samples left over; 2 epochs and a step
ARGUMENTS = f"--batch_size {BATCH_SIZE} --max_steps {NUM_STEPS} --log_every 1 --learning_rate 0.1 --eval_every 100"
ARGUMENTS += " --check_steps 0"
# Config, processes, --micro_batch_size.
DIVISIONS = [("ddp", 1, 4), ("ddp", 2, 8), ("ddp", 2, 2), ("ddp", 4, 1), ("deepspeed_zero2", 2, 2)]


@pytest.fixture(params=DIVISIONS, ids=lambda division: "-".join(map(str, division)))
def divided(request: pytest.FixtureRequest, made_once: Callable[..., Run]) -> Run:
    """A run of the global batch on some processes and micro-batches."""
    config, num_processes, micro_batch_size = request.param
    arguments = f"{ARGUMENTS} --micro_batch_size {micro_batch_size}"
    return made_once(config, SAME_SAMPLES, arguments, f"--num_processes {num_processes}")


def ids_of_each_step(run: Run) -> list[list[int]]:
    """The sample ids of each optimizer step over all processes, sorted."""
    fetched = [[int(i) for i in path.read_text().split()] for path in run.output_dir.glob("train_ids_*.txt")]
    assert len(fetched) == run.card["num_processes"]
    share = BATCH_SIZE // len(fetched)
    # At first each fetches 16 samples for the identity of the data, one twice to see whether it keeps what it draws,
    # four to compare them with the other processes, and one to see whether a batch draws.
    num_first = 18 + (5 if len(fetched) > 1 else int(run.card["gradient_accumulation_steps"] > 1))
    assert {len(ids) for ids in fetched} == {NUM_STEPS * share + num_first}
    fetched = [ids[-NUM_STEPS * share :] for ids in fetched]
    return [
        sorted(index for ids in fetched for index in ids[step * share : (step + 1) * share])
        for step in range(NUM_STEPS)
    ]


def test_same_samples_on_any_number_of_processes(divided: Run, reference: Callable[..., Run]) -> None:
    expected = ids_of_each_step(reference(SAME_SAMPLES, ARGUMENTS))
    assert ids_of_each_step(divided) == expected
    for first_step in (0, 3):  # an epoch has no sample twice
        epoch = sum(expected[first_step : first_step + 3], [])
        assert len(set(epoch)) == len(epoch) == 48 and set(epoch) <= set(range(NUM_SAMPLES))
    assert expected[0] != expected[3]  # and each epoch has another order


def test_evaluation_counts_each_sample_once(divided: Run) -> None:
    """The means of id and id² are right for ids 0 to n - 1: no sample is missing, none counts twice."""
    found = [json.loads(path.read_text()) for path in divided.output_dir.glob("evaluated_*.json")]
    assert len(found) == divided.card["num_processes"] and found[0].keys() == {"1", "7", "359"}
    for name in found[0]:
        size, (*means, num_fetched) = int(name), found[0][name]
        assert means == pytest.approx(((size - 1) / 2, (size - 1) * (2 * size - 1) / 6), rel=1e-12)
        assert {one[name][2] for one in found} == {num_fetched}  # the same number of forward passes in each process


@pytest.mark.parametrize("config", ["ddp", "deepspeed_zero2"])
def test_weights_are_those_of_the_global_batch(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    arguments = f"{ARGUMENTS} --weighted"
    expected = reference(SAME_SAMPLES, arguments)
    run = fork(tmp_path / "run", config, SAME_SAMPLES, f"{arguments} --micro_batch_size 4", 2)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= 1e-5
    assert weight_distance(run, expected) <= 1e-5
    assert run.column("eval/loss") == pytest.approx(expected.column("eval/loss"), rel=1e-5)
    # Ids 0 to 4 have the weights 1, 2, 3, 1, 2.
    assert expected.column("eval/id") == [pytest.approx((0 + 2 + 6 + 3 + 8) / 9)]
    unweighted = reference(SAME_SAMPLES, ARGUMENTS)
    assert largest_difference(unweighted.column("train/loss"), expected.column("train/loss")) > 1e-3


@pytest.mark.parametrize(
    ("script", "arguments", "num_workers"), [(SAME_SAMPLES, ARGUMENTS, 2), (MNIST, "--max_steps 3 --log_every 1", 1)]
)
def test_worker_processes_fetch_the_same(
    tmp_path: Path, reference: Callable[..., Run], script: str, arguments: str, num_workers: int
) -> None:
    """The image dataset returns whole batches."""
    run = fork(tmp_path / "run", "ddp", script, f"{arguments} --num_workers {num_workers}")
    expected = reference(script, arguments)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= 1e-5


def test_twin_written_by_hand_gives_the_same_losses(tmp_path: Path) -> None:
    arguments = (
        "--warmup_steps 0 --model mlp --optimizer sgd --learning_rate 0.5 --max_grad_norm 0 --lr_schedule constant"
    )
    run = fork(tmp_path / "run", "ddp", MNIST, f"{arguments} --max_steps 20 --log_every 1")
    script = str(ROOT / "tests/scripts/twin.py")
    launch = ["launch", "--config_file", str(CONFIGS / "ddp.yaml"), "--main_process_port", "0", script, "20", "0.5"]
    twin = accelerate_forked(launch, tmp_path, tmp_path)
    losses = json.loads(twin.stdout)
    assert largest_difference(run.column("train/loss"), losses) <= 1e-5
    assert losses[-1] < 0.97 * losses[0]  # it learns: losses that do not change would also be equal
