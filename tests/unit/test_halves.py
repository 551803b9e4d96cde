"""Promise: a run says if the result depends on how the samples of a batch are divided, also in training alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes.common.check.first_pass import FirstPass, outcome_of
from accelerate_recipes.common.data import Batch

Change = Callable[[Tensor], Tensor]
LENGTHS, WIDTH = (3, 5, 2, 4, 6, 1, 7, 4), 6
OWN = torch.Generator().manual_seed(0)
CALLS: list[int] = []


class Net(nn.Module):
    def __init__(self, change: Change = lambda hidden: hidden, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)  # with some weights, the upper half of each half is that of the whole
        self.change, self.dropout = change, nn.Dropout(dropout)
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(F.gelu(self.first(x)))
        output: Tensor = self.second(self.change(hidden) if self.training else hidden)
        return output.squeeze(-1)


def fetch(ids: Tensor) -> Batch:
    """Samples padded with zeros to the longest of the batch: a sample has as many rows as its length."""
    generators = [torch.Generator().manual_seed(int(index)) for index in ids]
    rows = [torch.randn(LENGTHS[index], WIDTH, generator=each) for index, each in zip(ids.tolist(), generators)]
    return {"x": nn.utils.rnn.pad_sequence(rows, batch_first=True), "length": torch.tensor([len(row) for row in rows])}


def masked(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
    """The mean over the rows of each sample, without padding."""
    kept = torch.arange(batch["x"].shape[1]) < batch["length"].unsqueeze(1)
    return {"loss": ((model(batch["x"] * kept.unsqueeze(-1)) - 1) ** 2 * kept).sum(1) / batch["length"]}


def padded(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
    """The mean over all rows."""
    return {"loss": ((model(batch["x"]) - 1) ** 2).mean(1)}


def summed(change: Callable[[Tensor], Tensor]) -> Any:
    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        losses = masked(model, batch, step)["loss"]
        return {"loss": change(losses) if model.training else losses}

    return forward_step


def mixup(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
    mixed = batch | {"x": 0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0)} if model.training else batch
    return masked(model, mixed, step)


def with_hook(hook: Change) -> Change:
    """A layer whose output has this hook on its gradient."""

    def change(hidden: Tensor) -> Tensor:
        hidden = hidden * 1
        if hidden.requires_grad:
            hidden.register_hook(hook)
        return hidden

    return change


def counted(losses: Tensor) -> Tensor:
    CALLS.append(1)
    return losses * len(CALLS)


def looked_at(model: nn.Module, values_of: Any, number: int = len(LENGTHS), **given: Any) -> FirstPass:
    found = FirstPass(**{"holds": True} | given)
    found.compare_halves(partial(outcome_of, model.train(), values_of, 0), fetch, torch.arange(number), 1e-3)
    assert model.training and all(weight.grad is None for weight in model.parameters())
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("number", [8, 7, 2, 1])
def test_samples_that_are_computed_alone(dropout: float, number: int) -> None:
    found = looked_at(Net(dropout=dropout), masked, number)
    assert not found.mixes and not found.mixes_gradients and not found.draws_in_evaluation


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("change", "values_of"),
    [
        (lambda hidden: hidden - hidden.mean(0), masked),
        (lambda hidden: hidden, mixup),
        (lambda hidden: hidden, summed(lambda losses: losses * (losses >= losses.quantile(0.5)))),
        (lambda hidden: hidden, summed(lambda losses: losses / losses.detach().mean())),
        (lambda hidden: hidden, summed(lambda losses: losses.mean().expand(len(losses)))),
    ],
)
def test_values_that_mix_samples_in_training_alone(dropout: float, change: Change, values_of: Any) -> None:
    found = looked_at(Net(change, dropout), values_of)
    assert found.mixes == ["loss"] and not found.mixes_gradients


def test_weights_of_samples_that_depend_on_the_micro_batch() -> None:
    def shares(ids: Tensor) -> Batch:
        batch = fetch(ids)
        return batch | {"weight": batch["length"] / batch["length"].sum()}

    found = FirstPass()
    found.compare_halves(partial(outcome_of, Net(), masked, 0), shares, torch.arange(len(LENGTHS)), 1e-3)
    assert set(found.mixes) == {"weight"}


def test_values_that_depend_on_the_size_of_the_micro_batch() -> None:
    assert looked_at(Net(), summed(lambda losses: losses / len(losses))).mixes == ["loss"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_padding_without_a_mask(dropout: float) -> None:
    """With dropout, an evaluation shows it."""
    assert set(looked_at(Net(dropout=dropout), padded).mixes) == {"loss"}
    assert not looked_at(Net(), padded, 1).mixes


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "hook", [lambda gradient: gradient - gradient.mean(0), lambda gradient: gradient / gradient.norm()]
)
def test_gradients_that_mix_samples(dropout: float, hook: Change) -> None:
    found = looked_at(Net(with_hook(hook), dropout), masked)
    assert found.mixes_gradients and not found.mixes


@pytest.mark.parametrize("hook", [lambda gradient: gradient.clamp(-1e-2, 1e-2), lambda gradient: -gradient])
def test_hooks_that_see_each_sample_alone(hook: Change) -> None:
    assert not looked_at(Net(with_hook(hook)), masked).mixes_gradients


def test_hook_that_draws_is_a_draw() -> None:
    found = looked_at(Net(with_hook(lambda gradient: gradient + torch.randn_like(gradient))), masked)
    assert found.draws and not found.mixes_gradients


def test_what_the_recipe_keeps_is_no_mixing() -> None:
    """Each pass has other values, whatever the samples."""
    noise = summed(lambda losses: losses + torch.randn(losses.shape, generator=OWN))
    for values_of in (summed(counted), noise):
        found = looked_at(Net(), values_of)
        assert not found.mixes and not found.mixes_gradients and found.moves
    assert not looked_at(Net(), masked).moves


def test_what_training_changes_for_evaluation_is_found() -> None:
    factor = [1.0]

    def scaled(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        values = masked(model, batch, step)
        if model.training:
            factor[0] *= 2
            return values
        return {name: value * factor[0] for name, value in values.items()}

    found = looked_at(Net(), scaled)
    assert found.moves and not found.mixes


def test_batches_that_are_drawn_are_not_drawn_again() -> None:
    """Halves of the batch itself: a `collate_fn` would draw something else for each half."""
    assert not looked_at(Net(), padded, draws_for_batches=True).mixes
    found = looked_at(Net(lambda hidden: hidden - hidden.mean(0)), masked, draws_for_batches=True)
    assert found.mixes == ["loss"]


def test_model_that_takes_no_half_batch() -> None:
    def eight_samples(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        assert len(batch["x"]) == len(LENGTHS)
        return masked(model, batch, step)

    assert not looked_at(Net(), eight_samples).mixes
