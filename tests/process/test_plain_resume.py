"""Promise: a script of recipes/plain that resumes gives the losses and weights of one that was not interrupted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


@pytest.mark.parametrize(
    ("config", "num_processes"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4), ("deepspeed_zero2", 2)]
)
def test_plain_accelerate_resumes_exactly_and_exports(tmp_path: Path, config: str, num_processes: int) -> None:
    """Clips in each step, and changes the learning rate in each step."""
    script = "plain_accelerate.py"
    flags = "--steps 24 --optimizer adamw --learning_rate 0.01 --lr_schedule cosine --warmup_steps 3 "
    flags += "--max_grad_norm 0.05 --output_dir"
    reference = plain(tmp_path, script, f"{flags} {tmp_path}/one")
    more = {"run": "--save_every 13", "resumed": f"--resume {tmp_path}/run/step_13"}
    whole, resumed = (
        plain(tmp_path, script, f"{flags} {tmp_path}/{name} --accumulate 2 {own}", num_processes, config)
        for name, own in more.items()
    )
    assert largest_difference(losses(whole), losses(reference)) <= 1e-5
    # With more than two processes the order of sums depends on DDP's buckets, which it divides anew in its second step.
    tolerance = 0.0 if num_processes == 2 else 1e-5
    assert largest_difference(losses(resumed), losses(whole)[13:]) <= tolerance
    one, run, again = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "run", "resumed"))
    for name, weight in one.items():
        assert (run[name] - again[name]).abs().max() <= tolerance
        assert (run[name] - weight).abs().max() <= 1e-5
