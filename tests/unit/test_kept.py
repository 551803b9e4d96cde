"""Promise: what trains in the parity check has afterwards what it had before, and a copy is never asked."""

import itertools
import random
import subprocess
import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from accelerate_recipes.common.alone.kept import Changes, _noted_files, kept

CPU = torch.device("cpu")
CALLS = 0


class Counter:
    number = 0


class Slotted:
    __slots__ = "number"

    def __init__(self) -> None:
        self.number = 0


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data  # two weights that share their data
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


def test_what_is_the_number_of_the_step_counts_no_calls() -> None:
    calls, now, of_layers = [0, 5], [0, 5], {"step": 0}

    def forward_step(step: int) -> None:
        calls[0], now[0], of_layers["step"] = calls[0] + 2, step, step

    with kept(*trained(), [forward_step], CPU) as changes:
        for step in range(2):
            forward_step(step)
            changes.step = step
    assert changes.names == ["calls"]
    assert (calls, now, of_layers) == ([0, 5], [0, 5], {"step": 0})


def test_weights_state_and_flags_are_given_back() -> None:
    model, optimizer = trained()
    train(model, optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slots = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    addresses, gradient = [weight.data_ptr() for weight in model.parameters()], model[0].bias.grad.clone()
    with kept(model, optimizer, [], CPU):
        model.eval()
        model.register_forward_hook(lambda *others: None)
        vars(model[0].weight)["scale"] = model[0].calls = 3
        for _ in range(3):
            train(model, optimizer)
        # In their own memory, which arrays of NumPy may share.
        assert model[2].weight.data_ptr() == model[0].weight.data_ptr() == addresses[0]
        model[0].weight.requires_grad_(False)
        model[2].weight.data = torch.zeros(4, 4)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    for state, own in zip(optimizer.state.values(), slots, strict=True):
        assert all(torch.equal(value, own[name]) for name, value in state.items())
    assert torch.equal(model[0].bias.grad, gradient) and model[0].weight.requires_grad and model.training
    assert not model._forward_hooks and not hasattr(model[0], "calls") and not vars(model[0].weight)
    assert len(optimizer.param_groups) == 1


def counting(model: nn.Module) -> tuple[Any, Any]:
    """(a function that counts in many places, what it has counted)"""
    listed, named, free, slotted, line = [0], {"number": 0}, types.SimpleNamespace(number=0), Slotted(), deque([0])
    own, array, generator, teacher = 0, numpy.zeros(1), numpy.random.default_rng(0), torch.zeros(2)
    unused = [random.Random(0), numpy.random.default_rng(0), numpy.random.RandomState(0), torch.Generator()]

    def step() -> None:
        nonlocal own
        global CALLS
        CALLS, own = CALLS + 1, own + 1
        for counter in (listed, line):
            counter[0] += 1
        for counter in (free, slotted, Counter):
            counter.number += 1
        named["number"] += 1
        vars(step)["number"] = vars(step).get("number", 0) + 1
        array[0] += 1
        teacher.add_(1)
        generator.random()
        model.passes = getattr(model, "passes", 0) + 1

    def counted() -> list[Any]:
        numbers = [CALLS, own, listed[0], line[0], free.number, slotted.number, Counter.number, named["number"]]
        return [*numbers, vars(step).get("number", 0), int(array[0]), int(teacher[0]), getattr(model, "passes", 0)]

    step.generator, step.unused = generator, unused  # type: ignore[attr-defined]
    return step, counted


def test_a_model_without_memory_is_left_alone() -> None:
    """As in PyTorch's tutorial of ensembles: torch.func calls it with other weights."""
    skeleton, (model, optimizer) = nn.Linear(4, 4, device="meta"), trained()
    before = [weight.clone() for weight in model.parameters()]

    def forward_step() -> torch.Tensor:
        return torch.func.functional_call(skeleton, dict(model[0].named_parameters()), torch.ones(4))

    with kept(model, optimizer, [forward_step], CPU) as changes:
        train(model, optimizer)
        forward_step()
    assert all(map(torch.equal, model.parameters(), before)) and skeleton.weight.is_meta and not changes.names


def test_what_functions_count_is_given_back_and_named() -> None:
    model, optimizer = trained()
    step, counted = counting(model)
    expected = numpy.random.default_rng(0).random()
    with kept(model, optimizer, [step], CPU) as changes:
        for _ in range(3):
            step()
        assert counted() == [3] * 12
    assert counted() == [0] * 12 and step.generator.random() == expected
    places = {"CALLS", "own", "listed", "line", "free.number", "slotted.number", "Counter.number", "named.number"}
    assert places | {"step.number", "array", "teacher", "passes"} <= {*changes.names}
    assert changes.generators == ["generator"]


@pytest.mark.parametrize("make", [itertools.count, lambda: iter([1, 2, 3]), lambda: (number for number in range(3))])
def test_iterators_that_move_on_are_lost(make: Any) -> None:
    model, optimizer = trained()
    numbers, still, drawn = make(), make(), random.Random(0)

    def step() -> tuple[Any, float]:
        return next(numbers if still is not None else still), drawn.random()

    with kept(model, optimizer, [step], CPU) as changes:
        step()
    assert changes.lost == ["numbers"] and drawn.random() == random.Random(0).random()


def test_a_generator_inside_another_moves_on() -> None:
    model, optimizer = trained()
    numbers = (lambda: (yield from itertools.count()))()
    next(numbers)
    with kept(model, optimizer, [lambda: next(numbers)], CPU) as changes:
        next(numbers)
    assert changes.lost == ["numbers"]


def test_a_class_of_classes_and_a_module_imported_in_a_function_are_given_back(monkeypatch: Any) -> None:
    module = types.ModuleType("counts_elsewhere")
    module.number = 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "counts_elsewhere", module)

    class Single(type):
        made = 0

    class Meter(metaclass=Single):
        pass

    def step() -> None:
        import counts_elsewhere  # type: ignore[import-not-found]

        counts_elsewhere.number += 1
        type(Meter).made += 1

    model, optimizer = trained()
    with kept(model, optimizer, [step], CPU) as changes:
        step()
    assert (module.number, Single.made) == (0, 0)  # type: ignore[attr-defined]
    assert {"counts_elsewhere.number", "Single.made"} <= {*changes.names}


def test_data_that_is_shared_is_named() -> None:
    model, optimizer = trained()
    with kept(model, optimizer, [], CPU) as changes:
        pass
    assert {*changes.sharing} == {"0.weight", "2.weight"}
    assert changes == Changes(sharing=changes.sharing)


def test_a_pipe_is_not_a_file_that_a_pass_writes(tmp_path: Path) -> None:
    found = list[str]()
    with _noted_files(found):
        subprocess.run(["true"], input=b"text", check=True)
        (tmp_path / "notes.txt").write_text("text")
    assert found == [str(tmp_path / "notes.txt")]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_only_what_a_checkpoint_stores_is_not_forgotten(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.register_buffer("unsaved", torch.zeros(1), persistent=False)
    slow = [weight.detach().clone() for weight in model.parameters()]
    numpy.arange(4.0).tofile(tmp_path / "mapped")
    mapped = torch.from_numpy(numpy.memmap(tmp_path / "mapped", mode="r"))  # to write it ends the process
    view, counts = slow[0].view(-1), torch.zeros(2)

    def follow(*args: Any) -> None:
        for weight, other in zip(model.parameters(), slow):
            other.lerp_(weight.detach(), 0.5)

    def forward_step() -> None:
        train(model, optimizer)
        counts.add_(1 + mapped[0])
        model.unsaved += 1  # type: ignore[operator]

    optimizer.register_step_post_hook(follow)
    with kept(model, optimizer, [forward_step], CPU) as changes:
        forward_step()
        before, weights = [each.clone() for each in slow], [each.clone() for each in model.parameters()]
        momentum = optimizer.state[model[0].weight]["exp_avg"].clone()
        changes.forget()
        assert not (before[0] == slow[0]).any() and (view == slow[0].view(-1)).all()
        assert not counts.any() and not model.unsaved.any()  # type: ignore[operator, union-attr]
        assert all(map(torch.equal, weights, model.parameters()))
        assert torch.equal(momentum, optimizer.state[model[0].weight]["exp_avg"]) and model[1].num_batches_tracked == 1
        forward_step()
    assert {"slow", "counts", "unsaved"} <= {*changes.all_names()} and "mapped" not in changes.all_names()
