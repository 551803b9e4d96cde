"""Promise: Muon makes the steps of its definition on hidden matrices, and those of AdamW on all other weights."""

import copy
import math

import torch
from torch import Tensor, nn

from common.models.muon import Muon, orthogonalized

RATE, DECAY = 1e-2, 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.wide, self.tall = nn.Linear(6, 24), nn.Linear(24, 6)
        self.convolution = nn.Conv1d(6, 6, 1)
        self.head = nn.Linear(6, 7, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def give_gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in net.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def expected_update(average: Tensor) -> Tensor:
    """Keller Jordan's polynomial on the singular values, times the factor of Moonlight. In float64."""
    left, values, right = torch.linalg.svd(average.double(), full_matrices=False)
    values /= values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return 0.2 * math.sqrt(max(average.shape)) * left @ values.diag() @ right


def test_hidden_matrices_make_the_steps_of_muon() -> None:
    net = Net()
    optimizer = Muon(net, RATE, DECAY)
    weights = {name: getattr(net, name).weight for name in ("wide", "tall")}
    expected = {name: weight.detach().double().clone() for name, weight in weights.items()}
    averages = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for step in range(3):
        give_gradients(net, step)
        for name, weight in weights.items():
            averages[name] = 0.95 * averages[name] + 0.05 * weight.grad
            update = expected_update(0.05 * weight.grad + 0.95 * averages[name])
            expected[name] = (1 - RATE * DECAY) * expected[name] - RATE * update
        optimizer.step()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-6 * weight.norm()


def test_hidden_matrices_make_the_steps_of_torch() -> None:
    """torch computes in bf16, so the steps are equal but for some per cent."""
    ours, theirs = Net(), Net()
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    Muon(ours, RATE, 0.0).step()
    weight, before = theirs.wide.weight, Net().wide.weight
    torch.optim.Muon([weight], RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    assert (ours.wide.weight - weight).norm() <= 0.03 * (weight - before).norm()


def test_other_weights_make_the_steps_of_adamw() -> None:
    ours, theirs = Net(), Net()
    optimizer = Muon(ours, RATE, DECAY)
    others = {"head.weight", "convolution.weight"}  # they decay
    weights = dict(theirs.named_parameters())
    plain = {name for name in weights if name.endswith("bias")} | {"embedding.weight"}
    groups = [
        {"params": [weights[name] for name in sorted(names)], "weight_decay": decay}
        for names, decay in ((others, DECAY), (plain, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, RATE)
    for step in range(3):
        for net in (ours, theirs):
            give_gradients(net, step)
        optimizer.step()
        adamw.step()
    for name, weight in ours.named_parameters():
        is_equal = torch.allclose(weight, weights[name], rtol=1e-6, atol=1e-8)
        assert is_equal == (name not in ("wide.weight", "tall.weight")), name


def test_size_of_a_step_is_that_of_adamw() -> None:
    net = Net()
    before = net.wide.weight.detach().clone()
    give_gradients(net, 0)
    Muon(net, RATE, 0.0).step()
    assert 0.1 * RATE < (net.wide.weight - before).square().mean().sqrt() < 0.3 * RATE


def test_singular_values_become_equal() -> None:
    torch.manual_seed(0)
    for shape in ((8, 40), (40, 8)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.65 and values.max() < 1.25
    assert not orthogonalized(torch.zeros(3, 4)).any()


def test_state_is_saved_and_loaded() -> None:
    """The learning rate is in it. Weights that have no gradient stay as they are, and decay does not touch them."""
    ours, theirs = Net(), Net()
    optimizer = Muon(ours, RATE, DECAY)
    give_gradients(ours, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = RATE / 2
    restored = Muon(theirs, RATE, DECAY)
    theirs.load_state_dict(ours.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy tensors
    for net, one in ((ours, optimizer), (theirs, restored)):
        give_gradients(net, 1)
        net.tall.weight.grad = None
        one.step()
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters()))
