"""Promise: a script of recipes/plain that resumes gives the losses of one that was not interrupted."""

from pathlib import Path

import pytest
import torch

from support.plain import ONE_PROCESS, local_steps, losses, one_process, plain
from support.runs import largest_difference

pytestmark = pytest.mark.full


def test_ddp_resumes(tmp_path: Path) -> None:
    flags = f"--checkpoint {tmp_path / 'ddp.safetensors'}"
    plain(tmp_path, "ddp.py", f"--steps 20 --save_every 20 {flags}", 2)
    run = plain(tmp_path, "ddp.py", f"--steps 30 --resume {flags}", 1)
    assert largest_difference(losses(run), losses(one_process(30))[20:]) <= 1e-5


@pytest.mark.parametrize("num_processes", [1, 4])
def test_divided_state_resumes_on_another_number_of_processes(tmp_path: Path, num_processes: int) -> None:
    expected = local_steps(12, momentum=0.9)
    script, state = "distributed_optimizer.py", tmp_path / "state.pt"
    first = plain(tmp_path, script, f"--momentum 0.9 --steps 7 --save {state}", 2)
    assert largest_difference(losses(first), expected[:7]) <= 1e-5
    assert "optimizer state in each process: [640, 230]" in first.stdout
    # The file is the state of an ordinary optimizer, too.
    weights = list(ONE_PROCESS["make_net"](64, 0).parameters())
    optimizer = torch.optim.SGD(weights, 1.0, 0.9)
    optimizer.load_state_dict(torch.load(state, weights_only=True)["optimizer"])
    assert all(optimizer.state[weight]["momentum_buffer"].shape == weight.shape for weight in weights)
    second = plain(tmp_path, script, f"--momentum 0.9 --steps 12 --resume {state}", num_processes)
    assert largest_difference(losses(second), expected[7:]) <= 1e-5
    assert abs(expected[7] - losses(one_process(12))[7]) > 1e-4  # without the momentum the losses would be others
