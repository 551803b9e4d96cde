"""Promise: the scripts of recipes/plain that save communication or memory train nearly what one process trains."""

import re
from pathlib import Path

import pytest

from support.plain import accuracy, local_steps, losses, one_process, plain, rarely
from support.runs import Run, largest_difference

NUM_STEPS = 12  # 11 steps are an epoch
MANY_STEPS = 1500  # the loss falls from 2.32 to 1.44; in 60 steps it falls by 0.3 %, less than the tolerance of bf16
GRADIENT_BYTES = 4 * 870


def column(run: Run, name: str) -> list[float]:
    """The values that follow a name in the lines of the steps."""
    return [float(value) for value in re.findall(rf"^step .*\b{name} (\S+)", run.stdout, re.MULTILINE)]


@pytest.mark.parametrize(
    ("num_processes", "sync_every", "outer_momentum"),
    [(2, 1, 0.0), *rarely((4, 1, 0.0), (2, 5, 0.9), (4, 5, 0.0), (4, 5, 0.9))],
)
def test_replicas_are_identical_after_each_synchronisation(
    tmp_path: Path, num_processes: int, sync_every: int, outer_momentum: float
) -> None:
    """A synchronisation at each step is DDP."""
    arguments = f"--steps {NUM_STEPS} --sync_every {sync_every} --outer_momentum {outer_momentum}"
    run = plain(tmp_path, "local_sgd.py", arguments, num_processes)
    replicas = local_steps(NUM_STEPS, num_processes, sync_every, outer_momentum=outer_momentum)
    expected = losses(one_process(NUM_STEPS)) if sync_every == 1 else replicas
    assert largest_difference(losses(run), expected) <= 1e-5
    synchronised = [step % sync_every == 0 or step == NUM_STEPS for step in range(1, NUM_STEPS + 1)]
    assert [spread == 0 for spread in column(run, "spread")] == synchronised
    assert column(run, "bytes") == [GRADIENT_BYTES * is_sync_step for is_sync_step in synchronised]


@pytest.mark.parametrize(
    ("hook", "compressed_bytes", "num_processes", "tolerance"),
    [
        ("bf16", GRADIENT_BYTES // 2, 2, 1e-4),
        # One column and one row for each matrix (10 × 64, 10 × 10, 10 × 10), and three whole biases of 10. On a busy
        # machine a thread of gloo may hold the hook's last reference to the process group, and aborts the process.
        *rarely(
            ("powersgd --powersgd_start 4", 4 * (74 + 20 + 20 + 30), 2, 1e-3),
            ("powersgd --powersgd_start 4", 576, 4, 1e-3),
            ("fp16", GRADIENT_BYTES // 2, 2, 1e-4),
            ("none", GRADIENT_BYTES, 2, 1e-5),
            ("none", GRADIENT_BYTES, 4, 1e-5),
        ),
    ],
)
def test_compression_sends_less_and_changes_the_losses_little(
    tmp_path: Path, hook: str, compressed_bytes: int, num_processes: int, tolerance: float
) -> None:
    run = plain(tmp_path, "compressed_gradients.py", f"--steps {NUM_STEPS} --hook {hook}", num_processes)
    num_whole = 4 if "powersgd" in hook else 0
    sent = [int(count) for count in re.findall(r"bytes (\d+)", run.stdout)]
    assert sent == [GRADIENT_BYTES] * num_whole + [compressed_bytes] * (NUM_STEPS - num_whole)
    plain_losses = [float(loss) for loss in re.findall(r"loss \S+  plain (\S+)", run.stdout)]
    assert largest_difference(plain_losses, losses(one_process(NUM_STEPS))) <= 1e-5
    assert largest_difference(losses(run), plain_losses) <= tolerance


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "num_processes"),
    [("--precision bf16", 2), ("--precision fp16", 2), ("", 1), ("--precision bf16", 4), ("--precision fp16", 4)],
)
def test_mixed_precision_changes_the_losses_little(tmp_path: Path, flags: str, num_processes: int) -> None:
    run = plain(tmp_path, "mixed_precision.py", f"--steps {MANY_STEPS} {flags}", num_processes)
    assert f"{flags[-4:] or 'bf16'} on cpu" in run.stdout
    expected = losses(one_process(MANY_STEPS))
    # Not below 1e-6: that would be float32.
    assert 1e-6 < largest_difference(losses(run), expected) <= 0.005
    assert expected[-1] < 0.7 * expected[0]


@pytest.mark.full
def test_scaler_skips_steps_that_overflow(tmp_path: Path) -> None:
    """Each skipped step halves the scale. Steps that were skipped leave the weights as they were."""
    run = plain(tmp_path, "mixed_precision.py", "--precision fp16 --initial_scale 1e12 --steps 60", 2)
    found = re.search(r"loss scale (\S+)", run.stdout)
    assert found is not None and float(found[1]) == pytest.approx(1e12 / 2**21, rel=1e-5)
    assert largest_difference(losses(run)[:1], losses(one_process(60))[:1]) <= 1e-5
    assert largest_difference(losses(run), losses(one_process(60))) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake", ["bf16_weights --precision bf16", "clip_scaled --precision fp16 --max_grad_norm 0.5"]
)
def test_mistakes_in_precision_do_not_train(tmp_path: Path, mistake: str) -> None:
    run = plain(tmp_path, "mixed_precision.py", f"--steps 3000 --mistake {mistake}", 1)
    assert losses(run)[-1] > 2.2 and accuracy(run) < 0.2


@pytest.mark.parametrize(
    ("arguments", "num_processes"),
    [
        ("", 2),
        *rarely(
            ("--pipeline", 2),
            ("--pipeline --data_parallel 2", 4),
            ("", 1),
            ("--pipeline", 1),
            ("--data_parallel 2", 2),
            ("--data_parallel 2", 4),
        ),
    ],
)
def test_halves_of_a_net_give_the_losses_of_one_process(tmp_path: Path, arguments: str, num_processes: int) -> None:
    run = plain(tmp_path, "model_parallel.py", arguments, num_processes)
    assert largest_difference(losses(run), losses(one_process(60))) <= 1e-5
    num_copies = 2 if "data_parallel" in arguments else 1
    weights = ["870"] if num_processes == num_copies else ["650", "220"]
    expected = [(str(copy), str(stage), number) for copy in range(num_copies) for stage, number in enumerate(weights)]
    assert sorted(re.findall(r"^copy (\d), stage (\d): (\d+) weights$", run.stdout, re.MULTILINE)) == expected
