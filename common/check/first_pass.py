"""Side effects of the first forward pass: random draws, changed buffers, values that depend on the micro-batch."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..data.sets import Batch, NumberedStep, copied_batch
from ..errors import UsageError
from ..plan import Plan
from ..seeds import EVALUATION, generator_states, restore_generators, seed_forward
from ..step.batch_loss import Values
from ..step.engine import evaluating
from .sketch import Sketch


@dataclass
class FirstPass:
    """Measured around a call of `forward_step` in training mode."""

    draws: bool = False  # whether it draws from a generator of Python, NumPy or torch
    draws_for_batches: bool = False  # whether `__getitems__` or the `collate_fn` draws
    written: list[str] = field(default_factory=list)  # names of the weights and buffers that it changes
    mixes: list[str] = field(default_factory=list)  # names of values that depend on the other samples
    mixes_gradients: bool = False  # whether their gradients depend on them, though the values do not
    low_weights: str = ""  # the type of weights with fewer bits than float32; "" if there are none
    has_low_layers: bool = False  # whether a layer computes with fewer bits than float32, in a float32 config
    has_no_low_layers: bool = False  # whether no layer does, in a bf16 config
    draws_in_evaluation: bool = False  # whether it draws from a generator in evaluation mode, too
    # names of things that `forward_step` or a layer changes at each call: variables, numbers, and lists that grow
    keeps: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # the same, if a later step needs it; a checkpoint does not store it
    holds: bool = False  # whether layers hold state or a cache that steps change
    written_in_evaluation: list[str] = field(default_factory=list)  # names of the buffers that an evaluation changes
    moves: bool = False  # whether a pass changes what later passes use: another evaluation would change them
    files: list[str] = field(default_factory=list)  # files that it opens for writing
    differentiates: str = ""  # the name of a weight that it differentiates by

    @contextmanager
    def watch(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Watches the forward pass of a recipe's model in the `with` block."""
        before = {name: (tensor, tensor._version) for name, tensor in module.named_parameters()}
        buffers = _buffers(module)
        states = generator_states(device)
        grad, names = torch.autograd.grad, {id(weight): name for name, (weight, _) in before.items()}

        def noted_grad(outputs: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            given = [inputs] if isinstance(inputs, Tensor) else [*inputs]
            self.differentiates = next((names[id(each)] for each in given if id(each) in names), self.differentiates)
            return grad(outputs, given, *args, **named)

        with _no_new_weights(module), patch.object(torch.autograd, "grad", noted_grad):
            yield
        self.draws = generator_states(device) != states or self.draws
        changed = [name for name, (tensor, version) in before.items() if tensor._version != version]
        self.written, self.moves = changed + _changed(buffers, module), self.moves or bool(changed)

    def compare_halves(
        self,
        take_pass: Callable[..., "Outcome"],
        fetch: Callable[[Tensor], Batch],
        ids: Tensor,
        tolerance: float,
        unseen: Tensor | None = None,
        sizes: Callable[[], Counter[str]] = Counter,
    ) -> None:
        """Finds values and gradients that depend on the other samples of a micro-batch, in evaluation and in training:
        takes each half alone; twice if a pass draws or a `collate_fn` sorts, so that each sample has the same numbers
        and place. If layers hold anything, also finds values that the passes change for later passes, and things that
        grow (`sizes`) with samples that are new to the layers (`unseen`), although their shapes are the same."""
        size, evaluated = len(ids) // 2, None
        for trains in (False, True) if size else ():
            take, mixed = partial(take_pass, trains), dict[str, None]()
            halves = slice(size), slice(size, 2 * size)
            try:
                whole = take(batch := fetch(ids[: 2 * size]), slice(None))
                rest, norm, draws = whole.gradient, 0.0, whole.draws or self.draws_for_batches
                parts = [] if draws else [fetch(ids[half]) for half in halves]
                parts = [] if parts and _is_sorted(batch, parts) else parts
                for half, alone in zip_longest(halves, parts):
                    part = take(_twice(batch, half), half) if alone is None else take(alone, slice(None))
                    mixed |= {name: None for name in part.values if not part.is_close(whole, name, tolerance, half)}
                    rest, norm = rest - part.gradient, norm + float(part.gradient.norm())
                is_sum = whole.draws_backwards or float(rest.norm()) <= 10 * tolerance * norm
                again = take(batch, slice(None)) if self.holds or mixed or not is_sum else whole
            except Exception:  # a model that cannot take half a batch
                continue
            self.draws_in_evaluation |= whole.draws and not trains
            self.draws |= whole.draws_backwards
            self.written_in_evaluation += [] if trains else part.written  # the first pass may fill a table
            evaluated = evaluated if trains else whole
            same = {name for name in whole.values if again.is_close(whole, name, tolerance)}
            self.moves |= len(same) < len(whole.values)
            self.mixes += [name for name in mixed if name in same]
            self.mixes_gradients |= not is_sum and not mixed and torch.equal(again.gradient, whole.gradient)
            if unseen is not None:
                with suppress(Exception):
                    take(_twice(others := fetch(unseen[: 2 * size]), slice(size)), slice(None))
                    before = sizes()
                    take(_twice(others, slice(size, 2 * size)), slice(None))
                    self.keeps += [name for name in sizes() - before if name]
        if self.holds and evaluated is not None and not self.written:  # as BatchNorm's statistics are
            later = take_pass(False, fetch(ids[: 2 * size]), slice(None))
            self.moves |= not all(later.is_close(evaluated, name, tolerance) for name in evaluated.values)

    def evaluation_at(self, number: int, numbers: Sequence[int]) -> str:
        """When a step evaluates, if these are compared: after the last, because an evaluation may switch weights; but
        before the first if passes change buffers, as BatchNorm does, which then differ; never if they write weights."""
        first, last = number == numbers[0] and not self.moves, number + 1 not in numbers
        return "before" * first if self.written else "after" * last

    def say(self, plan: Plan, say: Callable[[str], Any]) -> None:
        """Prints one line for each reason why the result depends on how the global batch is divided."""
        size, whole = plan.micro_batch_size, plan.config.batch_size
        first = {name: next(iter(getattr(self, name)), "") for name in ("files", "keeps", "mixes")}
        written = [*self.written, *self.written_in_evaluation]
        always = {
            f"the weights are {self.low_weights}: each update is rounded to few bits, and the result depends on how "
            "gradients are added up, by 1 % of the loss; make them float32": self.low_weights,
            "a layer computes in 16 bits: the result depends on how the config divides it, by 1 % of the "
            "loss": self.has_low_layers,
            "the config asks for bf16, but no layer computes in 16 bits, for example because autocast is off: the "
            "run takes the time and the memory of float32": self.has_no_low_layers,
            "the forward pass draws random numbers in evaluation, too, such as dropout that is always on; they depend "
            "on --micro_batch_size: use self.training, unless this is intended": self.draws_in_evaluation,
            f"a step uses {' or '.join(self.lost[:3])}, which the step before changed, and no checkpoint stores: a "
            "resumed run has another result; keep it in a persistent buffer or the optimizer's state, or compute it "
            "from step": self.lost,
            f"the parity check also wrote {first['files']}, which it does not restore": self.files,
            "two evaluations of one batch differ: the result depends on the number of processes, and is "
            "not compared; use only the batch and the model": self.moves and not (self.keeps or written),
        }
        if_cut = {
            f"each call of forward_step or of a layer changes {first['keeps']}: if it is used, the result depends on "
            "the number of calls, which the number of processes and --micro_batch_size change; a checkpoint does "
            "not store it; give forward_step a third argument, step, the number of the optimizer step, or give fit "
            "examples, for a metric over all samples": self.keeps,
            "the forward pass draws random numbers, such as dropout: they depend on --micro_batch_size, here "
            f"{size}, not on the number of processes": self.draws,
            "collate_fn or __getitems__ draws random numbers: they depend on --micro_batch_size, here "
            f"{size}, not on the number of processes; random numbers in __getitem__ do not": self.draws_for_batches,
            f"the forward pass changes {', '.join(written[:1])}, as BatchNorm does, and sees {size} of {whole} samples "
            "at a time: the result depends on the number of processes; to avoid that, use GroupNorm or "
            "LayerNorm": written,
            f'"{first["mixes"]}" of a sample depends on the other samples of its micro-batch, here {size} of {whole}: '
            "the result depends on the number of processes and on --micro_batch_size; mask padding, if there is any; "
            "give fit a loss that compares samples as batch_loss; replace a mean inside forward_step by one value per "
            'sample, with the weights as "weight" of the batch': not self.written and self.mixes,
            f"a hook or autograd function uses the gradient of a whole micro-batch, here {size} of {whole}: the result "
            "depends on the number of processes and on --micro_batch_size; use each sample's own "
            "gradient": not self.written and self.mixes_gradients,
        }
        for line, applies in {**always, **(if_cut if size != whole else {})}.items():
            if applies:
                say(line)


@dataclass
class Outcome:
    """The values of `forward_step` for a batch, and the weights of its samples."""

    values: Values
    gradient: Tensor  # of the sum of the losses, as sketches of all weights in a row; empty in evaluation
    draws: bool  # whether the forward pass draws from a generator
    draws_backwards: bool  # whether the backward pass does
    written: list[str]  # names of the buffers that the forward pass changes

    def is_close(self, whole: "Outcome", name: str, tolerance: float, half: slice = slice(None)) -> bool:
        """Whether a value is close, relative to its sample or a larger mean; True if shapes differ, as answers' do."""
        pair = self.values[name], whole.values[name][half]
        value, other = (each.double().reshape(len(each), -1).nan_to_num() for each in pair)
        if value.shape != other.shape:
            return True
        gaps, sizes = (value - other).norm(dim=1), other.norm(dim=1)
        return bool((gaps <= tolerance * sizes.clamp(min=float(sizes.mean())) + 1e-6).all())


def outcome_of(model: nn.Module, values_of: NumberedStep, step: int, trains: bool, batch: Batch, own: slice) -> Outcome:
    """The outcome of a batch, in which only the samples of `own` count."""
    with one_pass(model, batch, trains) as batch:
        device = next(value.device for value in batch.values() if isinstance(value, Tensor))
        states, buffers = [generator_states(device)], _buffers(model)
        whole = {name: batch[name] for name in {"weight"} & {*batch}} | values_of(model, batch, step)
        written = _changed(buffers, model)
        values = {name: value[own] for name, value in whole.items()}
        states.append(generator_states(device))
        losses = [values["loss"]] if "loss" in values else values.values()  # else for a batch_loss
        sums = [value.sum() for value in losses if value.requires_grad]
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(sums, weights, materialize_grads=True) if sums else ()
        sketches = torch.cat([torch.zeros(1), *(Sketch.of(each).sums for each in gradients if not each.is_sparse)])
        states.append(generator_states(device))
    values = {name: value.detach() for name, value in values.items()}
    return Outcome(values, sketches, states[0] != states[1], states[1] != states[2], written)


def _is_sorted(batch: Batch, parts: Sequence[Batch]) -> bool:
    """Whether a batch has the samples of these parts in another order; padded columns do not count."""
    columns = {name: [each.get(name) for each in (batch, *parts)] for name in batch}
    same = [name for name, each in columns.items() if len({getattr(one, "shape", "")[1:] for one in each}) == 1]
    whole, *own = ([*zip(*checksums({name: each[name] for name in same}).values())] for each in (batch, *parts))
    alone = [row for rows in own for row in rows]
    return whole != alone and sorted(whole) == sorted(alone)


def checksums(batch: Batch) -> dict[str, list[int]]:
    """A checksum of each sample, for each tensor of a batch."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.numel()}
    rows = {name: value.detach().cpu().reshape(len(value), -1).contiguous() for name, value in tensors.items()}
    return {name: [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in each] for name, each in rows.items()}


def _twice(batch: Batch, half: slice) -> Batch:
    """The samples of `half`, also in place of the others."""
    parts = {name: value[half] for name, value in batch.items()}
    return {name: torch.cat([part] * 2) if isinstance(part, Tensor) else part * 2 for name, part in parts.items()}


@contextmanager
def one_pass(model: nn.Module, batch: Batch, trains: bool = False) -> Iterator[Batch]:
    """A `with` block for a pass in evaluation, or training (`trains`), on a copy of the batch. Keeps the generators."""
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    mode, modes = nullcontext() if trains else evaluating(model), {each: each.training for each in model.modules()}
    with _no_new_weights(model), torch.set_grad_enabled(trains), mode, restore_generators(device):
        seed_forward(0, EVALUATION, 0, device)
        yield copied_batch(batch)
    for module, is_training in modes.items():  # forward_step may have changed it
        module.training = is_training


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers: BatchNorm changes no version."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _changed(before: dict[str, Tensor], module: nn.Module) -> list[str]:
    """The names of the buffers that are no longer as `before`; but a table may have grown."""
    now = dict(module.named_buffers())
    pairs = {name: (old, now[name]) for name, old in before.items() if name in now}
    cut = {name: tuple(map(slice, old.shape)) for name, (old, new) in pairs.items() if new.ndim == old.ndim}
    return [name for name, (old, new) in pairs.items() if name not in cut or not new[cut[name]].equal(old)]


@contextmanager
def _no_new_weights(module: nn.Module) -> Iterator[None]:
    """Raises UsageError if the forward pass in the `with` block creates a weight."""
    before = {name for name, _ in module.named_parameters()}
    yield
    for name in [name for name, _ in module.named_parameters() if name not in before]:
        raise UsageError(
            f"the forward pass creates the weight {name}, which neither the optimizer nor another process has: make it "
            "in the constructor"
        )
