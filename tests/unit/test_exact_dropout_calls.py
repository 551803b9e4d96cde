"""`--exact_dropout` in one process: each call of dropout has a mask of its own, and a repeated call the same one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common import RunConfig
from common.errors import UsageError
from common.parallel.exact_dropout import ExactDropout
from common.plan import Plan
from common.seeds import seed_forward

SIZE, WIDTH = 4, 64


class Net(nn.Module):
    """Calls one block three times; a block has two modules with dropout, and calls one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def block(self, hidden: Tensor) -> Tensor:
        return self.second(torch.tanh(self.layer(self.first(self.first(hidden)))))

    def forward(self, hidden: Tensor, call: Callable[..., Tensor]) -> Tensor:
        for _ in range(3):
            hidden = hidden + call(self.block, hidden)
        return hidden


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def exact(model: nn.Module, **flags: Any) -> ExactDropout:
    plan = Plan.of(RunConfig(batch_size=2 * SIZE, micro_batch_size=SIZE, **flags), 100, 1, 0)
    return ExactDropout(Accelerator(cpu=True), model, plan)


def begin(context: ExactDropout, step: int = 0, row: int = 0) -> None:
    seed_forward(0, step, row, torch.device("cpu"))
    context.at(step, row)


def test_each_call_has_a_mask_of_its_own(net: Net) -> None:
    ones, masks = torch.ones(SIZE, WIDTH), []
    with exact(net) as context:
        for step, row in ((0, 0), (0, 1), (1, 0)):
            begin(context, step, row)
            masks += [*net.first(ones), *net.first(ones), *net.second(ones), *F.dropout(ones, 0.5)]
        begin(context)
        again = [*net.first(ones), *net.first(ones), *net.second(ones), *F.dropout(ones, 0.5)]
    assert all(torch.equal(mask, other) for mask, other in zip(masks, again))
    assert {value for mask in masks for value in mask.tolist()} == {0.0, 2.0}
    agreement = torch.corrcoef(torch.stack(masks))[torch.triu_indices(48, 48, 1).unbind()]
    assert agreement.abs().max() < 5 / WIDTH**0.5


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpointing_repeats_the_masks(net: Net, is_reentrant: bool) -> None:
    def kept(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=is_reentrant)

    def twice(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return checkpoint(kept, block, hidden, use_reentrant=False)

    gradients = []
    hidden = torch.randn(SIZE, WIDTH, requires_grad=True)
    for call in (lambda block, hidden: block(hidden), kept, twice):
        with exact(net) as context:
            losses = []
            for row in range(2):  # a pipeline starts the second pass before it ends the first
                begin(context, row=row)
                losses.append(net(hidden, call).square().sum())
            for loss in losses:
                loss.backward()
        gradients.append((hidden.grad.clone(), net.layer.weight.grad.clone()))
        hidden.grad = net.layer.weight.grad = None
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_torch_has_its_functions_back(net: Net) -> None:
    before = F.dropout, F.scaled_dot_product_attention
    hidden = torch.randn(SIZE, WIDTH)
    with pytest.raises(ZeroDivisionError), exact(net) as context:
        begin(context)
        assert (F.dropout, F.scaled_dot_product_attention) != before
        assert torch.equal(net.eval().first(hidden), hidden)  # in evaluation, dropout does nothing
        raise ZeroDivisionError
    assert (F.dropout, F.scaled_dot_product_attention) == before
    assert not torch.nn.modules.module._global_forward_hooks


def test_heads_that_share_keys() -> None:
    query, key = torch.randn(SIZE, 4, 5, 8), torch.randn(SIZE, 2, 5, 8)
    options = {"dropout_p": 0.3, "is_causal": True}
    with exact(nn.Identity()) as context:
        begin(context)
        found = F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **options)
        begin(context)
        whole = key.repeat_interleave(2, 1)
        assert torch.equal(F.scaled_dot_product_attention(query, whole, whole, **options), found)


def test_the_length_may_be_that_of_the_micro_batch_by_chance(net: Net) -> None:
    with exact(net) as context:
        begin(context)
        net.first(torch.ones(2 * SIZE, 3, WIDTH))  # two rows a sample, as heads of attention
        begin(context)
        net.first(torch.ones(2 * SIZE, SIZE, WIDTH))
        with pytest.raises(UsageError, match="may be the 4 samples"):
            net.second(torch.ones(2 * SIZE, SIZE, WIDTH))  # perhaps (length, batch, width)
