"""Promise: the scripts of recipes/plain that divide or save communication train what one process trains."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from support.plain import PLAIN, losses, plain
from support.runs import Run, largest_difference

ONE_PROCESS = runpy.run_path(str(PLAIN / "one_process.py"), run_name="one_process")
NUM_STEPS = 12  # 11 steps are an epoch
GRADIENT_BYTES = 4 * 870
# The number of processes; make test runs the first.
TWO_AND_FOUR = [2, pytest.param(4, marks=pytest.mark.full)]
ALL_SIZES = [*TWO_AND_FOUR, pytest.param(1, marks=pytest.mark.full)]


def local_steps(num_replicas: int, sync_every: int, momentum: float = 0.0, outer_momentum: float = 0.0) -> list[float]:
    """The mean losses of replicas that are trained one after the other in this process."""
    images, labels, *_ = ONE_PROCESS["load_data"]("digits")
    nets = [ONE_PROCESS["make_net"](images.shape[1], 0) for _ in range(num_replicas)]
    optimizers = [torch.optim.SGD(net.parameters(), ONE_PROCESS["LEARNING_RATE"], momentum) for net in nets]
    shared = parameters_to_vector(nets[0].parameters()).detach().clone()
    velocity = torch.zeros_like(shared)
    means = []
    for step in range(NUM_STEPS):
        parts: tuple[Tensor, ...] = ONE_PROCESS["sample_ids"](step, len(images), 0).chunk(num_replicas)
        mean = 0.0
        for net, optimizer, ids in zip(nets, optimizers, parts):
            loss = F.cross_entropy(net(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean += loss.item() / num_replicas
        means.append(mean)
        if (step + 1) % sync_every == 0:
            distance = shared - torch.stack([parameters_to_vector(net.parameters()).detach() for net in nets]).mean(0)
            velocity = outer_momentum * velocity + distance
            shared = shared - (distance + outer_momentum * velocity)  # Nesterov's momentum; it is 0 for the mean
            for net in nets:
                vector_to_parameters(shared.clone(), net.parameters())
    return means


def column(run: Run, name: str) -> list[float]:
    """The values that follow a name in the lines of the steps."""
    return [float(value) for value in re.findall(rf"^step .*\b{name} (\S+)", run.stdout, re.MULTILINE)]


@pytest.mark.parametrize("num_processes", ALL_SIZES)
def test_divided_optimizer_gives_the_same_losses(tmp_path: Path, num_processes: int) -> None:
    run = plain(tmp_path, "distributed_optimizer.py", f"--steps {NUM_STEPS}", num_processes)
    assert largest_difference(losses(run), local_steps(1, 1)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("num_processes", [1, 4])
def test_divided_state_resumes_on_another_number_of_processes(tmp_path: Path, num_processes: int) -> None:
    expected = local_steps(1, 1, momentum=0.9)
    script, state = "distributed_optimizer.py", tmp_path / "state.pt"
    first = plain(tmp_path, script, f"--momentum 0.9 --steps 7 --save {state}", 2)
    assert largest_difference(losses(first), expected[:7]) <= 1e-5
    assert "optimizer state in each process: [640, 230]" in first.stdout
    # The file is the state of an ordinary optimizer, too.
    net = ONE_PROCESS["make_net"](64, 0)
    optimizer = torch.optim.SGD(net.parameters(), 1.0, 0.9)
    optimizer.load_state_dict(torch.load(state, weights_only=True)["optimizer"])
    assert [optimizer.state[weight]["momentum_buffer"].shape for weight in net.parameters()] == [
        weight.shape for weight in net.parameters()
    ]
    second = plain(tmp_path, script, f"--momentum 0.9 --steps {NUM_STEPS} --resume {state}", num_processes)
    assert largest_difference(losses(second), expected[7:]) <= 1e-5
    assert abs(expected[7] - local_steps(1, 1)[7]) > 1e-4  # without the momentum the losses would be others


@pytest.mark.parametrize("num_processes", TWO_AND_FOUR)
def test_synchronisation_at_each_step_is_ddp(tmp_path: Path, num_processes: int) -> None:
    run = plain(tmp_path, "local_sgd.py", f"--steps {NUM_STEPS} --sync_every 1", num_processes)
    assert largest_difference(losses(run), local_steps(1, 1)) <= 1e-5
    assert column(run, "spread") == [0.0] * NUM_STEPS


@pytest.mark.full
@pytest.mark.parametrize(("num_processes", "outer_momentum"), [(2, 0.9), (4, 0.0), (4, 0.9)])
def test_replicas_are_identical_after_each_synchronisation(
    tmp_path: Path, num_processes: int, outer_momentum: float
) -> None:
    arguments = f"--steps {NUM_STEPS} --sync_every 5 --outer_momentum {outer_momentum}"
    run = plain(tmp_path, "local_sgd.py", arguments, num_processes)
    expected = local_steps(num_processes, 5, outer_momentum=outer_momentum)
    assert largest_difference(losses(run), expected) <= 1e-5
    synchronised = [step in (5, 10, NUM_STEPS) for step in range(1, NUM_STEPS + 1)]
    assert [spread == 0 for spread in column(run, "spread")] == synchronised
    assert column(run, "bytes") == [GRADIENT_BYTES * is_sync_step for is_sync_step in synchronised]


@pytest.mark.full
@pytest.mark.parametrize("num_processes", [2, 4])
def test_hook_without_compression_is_ddp(tmp_path: Path, num_processes: int) -> None:
    run = plain(tmp_path, "compressed_gradients.py", f"--steps {NUM_STEPS} --hook none", num_processes)
    assert largest_difference(losses(run), local_steps(1, 1)) <= 1e-5
    assert re.findall(r"bytes (\d+)", run.stdout) == [str(GRADIENT_BYTES)] * NUM_STEPS


@pytest.mark.parametrize(
    ("hook", "compressed_bytes", "num_processes"),
    [
        # One column and one row for each matrix (10 × 64, 10 × 10, 10 × 10), and three whole biases of 10.
        ("powersgd --powersgd_start 4", 4 * (74 + 20 + 20 + 30), 2),
        pytest.param("powersgd --powersgd_start 4", 576, 4, marks=pytest.mark.full),
        pytest.param("bf16", GRADIENT_BYTES // 2, 2, marks=pytest.mark.full),
        pytest.param("fp16", GRADIENT_BYTES // 2, 2, marks=pytest.mark.full),
    ],
)
def test_compression_sends_less_and_changes_the_losses_little(
    tmp_path: Path, hook: str, compressed_bytes: int, num_processes: int
) -> None:
    run = plain(tmp_path, "compressed_gradients.py", f"--steps {NUM_STEPS} --hook {hook}", num_processes)
    expected, num_whole = local_steps(1, 1), 4 if "powersgd" in hook else 0
    sent = [int(count) for count in re.findall(r"bytes (\d+)", run.stdout)]
    assert sent == [GRADIENT_BYTES] * num_whole + [compressed_bytes] * (NUM_STEPS - num_whole)
    plain_losses = [float(loss) for loss in re.findall(r"loss \S+  plain (\S+)", run.stdout)]
    assert largest_difference(plain_losses, expected) <= 1e-5
    assert largest_difference(losses(run), plain_losses) <= (1e-3 if num_whole else 1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "size", "message"),
    [
        ("distributed_optimizer.py", "", "3", "a number of processes that divides 128 (now 3)"),
        ("distributed_optimizer.py", "--resume missing.pt", "2", "--resume: no file missing.pt"),
        ("local_sgd.py", "", None, "start with torchrun"),
        ("local_sgd.py", "--sync_every 0", "2", "--sync_every must be at least 1"),
        ("compressed_gradients.py", "", "3", "a number of processes that divides 128 (now 3)"),
        ("compressed_gradients.py", "--powersgd_start 1", "2", "--powersgd_start at least 2"),
    ],
)
def test_bad_combination_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    arguments: str,
    size: str | None,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    if size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(PLAIN / script), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
