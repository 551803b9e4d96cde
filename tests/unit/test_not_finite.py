"""Promise: a step whose gradient is not finite leaves the weights as they were."""

import math

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.step.setup import Setup


def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": model(batch["x"]).squeeze(-1)}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_on_the_cpu_no_optimizer_takes_the_step(make: type, value: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    setup = Setup(
        Accelerator(cpu=True), model, make(model.parameters(), 0.1), forward_step, Plan.of(RunConfig(), Layout(), 64)
    )
    engine = prepare(setup)
    good = {"x": torch.randn(64, 3)}
    engine.step(0, [good], wants_norm=False)
    before = [weight.clone() for weight in model.parameters()]
    bad = {"x": good["x"].clone()}
    bad["x"][5] = value
    assert not math.isfinite(engine.step(1, [bad], wants_norm=False).grad_norm)  # clipping needs the norm
    assert all(map(torch.equal, before, model.parameters()))
    assert math.isfinite(engine.step(2, [good], wants_norm=False).grad_norm)
    assert not any(map(torch.equal, before, model.parameters()))


def test_fused_kernels_look_at_a_flag_on_their_device() -> None:
    """On a GPU the engine sets it, so that no step waits for the norm."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), math.nan)
    for make in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = make([weight], 0.1, fused=True)
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
        optimizer.step()
        assert torch.equal(weight.detach(), torch.ones(3))


def test_fused_kernels_look_at_it_for_weights_that_fsdp2_divides() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        for found, expected in ((1.0, True), (0.0, False)):
            model(torch.ones(2, 3)).sum().backward()
            before = model.weight.to_local().clone()
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found)
            optimizer.step()
            assert torch.equal(before, model.weight.to_local()) == expected
    finally:
        torch.distributed.destroy_process_group()
