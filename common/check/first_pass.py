"""Side effects of the first forward pass: random draws, changed buffers, values that depend on the micro-batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.sets import Batch, NumberedStep
from ..errors import UsageError
from ..plan import Plan
from ..seeds import EVALUATION, generator_states, restore_generators, seed_forward
from ..step.batch_loss import Values
from ..step.engine import evaluating


@dataclass
class FirstPass:
    """Measured around a call of `forward_step` in training mode."""

    draws: bool = False  # whether it draws from a generator of Python, NumPy or torch
    draws_for_batches: bool = False  # whether `__getitems__` or the `collate_fn` draws
    written: list[str] = field(default_factory=list)  # names of the weights and buffers that it changes
    # names of the values of `forward_step` that depend on the other samples of the micro-batch
    mixes: list[str] = field(default_factory=list)
    low_weights: str = ""  # the type of weights with fewer bits than float32; "" if there are none
    has_low_layers: bool = False  # whether a layer computes with fewer bits than float32, in a float32 config
    has_no_low_layers: bool = False  # whether none does, in a bf16 config
    draws_in_evaluation: bool = False  # whether it draws from a generator in evaluation mode, too
    # names of variables and numbers that `forward_step` or a layer changes at each call
    keeps: list[str] = field(default_factory=list)
    moves: bool = False  # whether a pass changes what later ones use: another evaluation would change them
    files: list[str] = field(default_factory=list)  # that it opens for writing

    @contextmanager
    def watch(self, called: nn.Module, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Watches the forward pass in the `with` block. Raises UsageError if the pass did not call the model. `called`:
        the model that `forward_step` is given; `module`: the recipe's own one in it."""
        calls: list[bool] = []
        takes_hooks = not isinstance(called, torch.jit.ScriptModule)
        hook = called.register_forward_pre_hook(lambda module, args: calls.append(True)) if takes_hooks else None
        before = {name: (tensor, tensor._version) for name, tensor in module.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # BatchNorm changes no version
        states = generator_states(device)
        try:
            with _no_new_weights(module):
                yield
        finally:
            if hook is not None:
                hook.remove()
        if not calls and takes_hooks:
            raise UsageError(
                "forward_step never calls the model that it is given, so nothing connects the processes: call "
                "model(...), not one of its methods or layers, and not a model from outside forward_step"
            )
        self.draws = generator_states(device) != states or self.draws
        changed = [name for name, (tensor, version) in before.items() if tensor._version != version]
        later = dict(module.named_buffers())
        self.written = changed + [name for name, buffer in buffers.items() if not torch.equal(buffer, later[name])]

    def compare_half(self, model: nn.Module, values_of: NumberedStep, batch: Batch, number: int) -> None:
        """Finds values that depend on the other samples of a micro-batch, by running its first half alone."""
        size, states = len(next(iter(batch.values()))) // 2, []
        if not size:
            return

        def noted(model: nn.Module, batch: Batch, number: int) -> Values:
            device = next(value.device for value in batch.values() if isinstance(value, Tensor))
            states.append(generator_states(device))
            values = values_of(model, batch, number)
            states.append(generator_states(device))
            return values

        whole = evaluate_batch(model, values_of, batch, number)
        try:
            half = evaluate_batch(model, noted, {name: value[:size] for name, value in batch.items()}, number)
        except Exception:  # a model that cannot take half a batch
            return
        if states[0] != states[1]:  # noise depends on the micro-batch
            self.draws_in_evaluation = True
            return
        for name, value in half.items():
            expected = whole[name][:size]
            if value.shape != expected.shape:  # of generated answers: the longest may be in the other half
                continue
            if not torch.allclose(expected.double(), value.double(), 1e-3, 1e-6, equal_nan=True):
                self.mixes.append(name)

    def say(self, plan: Plan, say: Callable[[str], Any]) -> None:
        """Prints one line for each reason why the result depends on how the global batch is divided."""
        size, whole = plan.micro_batch_size, plan.config.batch_size
        first = {name: next(iter(getattr(self, name)), "") for name in ("files", "keeps", "written", "mixes")}
        always = {
            f"the weights are {self.low_weights}: each update is rounded to few bits, and the result depends on how "
            "gradients are added up, by 1 % of the loss; make them float32": self.low_weights,
            "a layer computes in 16 bits: the result depends on how the config divides it, by 1 % of the "
            "loss": self.has_low_layers,
            "the config asks for bf16, but no layer computes in 16 bits, for example because autocast is off: the "
            "run takes the time and the memory of float32": self.has_no_low_layers,
            "the forward pass draws random numbers in evaluation, too, such as dropout that is always on: use "
            "self.training, unless this is intended": self.draws_in_evaluation,
            f"the parity check also wrote {first['files']}, which it does not restore": self.files,
        }
        if_cut = {
            f"the recipe's functions change {first['keeps']} when they are called: the result depends on the number "
            "of calls, and so on the number of processes and on --micro_batch_size; give forward_step a "
            "third argument, step, the number of the optimizer step": self.keeps,
            "the forward pass draws random numbers, such as dropout: they depend on --micro_batch_size, here "
            f"{size}, not on the number of processes": self.draws,
            "collate_fn or __getitems__ draws random numbers: they depend on --micro_batch_size, here "
            f"{size}, not on the number of processes; those of __getitem__ do not": self.draws_for_batches,
            f"the forward pass changes {first['written']}, as BatchNorm does, and sees {size} of {whole} samples at a "
            "time: the result depends on the number of processes; to avoid that, use GroupNorm or "
            "LayerNorm": self.written,
            f'"{first["mixes"]}" of a sample depends on the other samples of its micro-batch, here {size} of {whole}: '
            "the result depends on the number of processes and on --micro_batch_size; give fit a loss that compares "
            "samples as batch_loss; replace a mean inside forward_step by one value per sample, with the weights as "
            '"weight" of the batch': self.mixes,
        }
        for line, applies in {**always, **(if_cut if size != whole else {})}.items():
            if applies:
                say(line)


@torch.no_grad()
def evaluate_batch(model: nn.Module, values_of: NumberedStep, batch: Batch, number: int) -> Values:
    """What `forward_step` returns in evaluation. Changes neither the batch nor a generator."""
    kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    device = next(value.device for value in kept.values() if isinstance(value, Tensor))
    with _no_new_weights(model), evaluating(model), restore_generators(device):
        seed_forward(0, EVALUATION, 0, device)
        return values_of(model, kept, number)


@contextmanager
def _no_new_weights(module: nn.Module) -> Iterator[None]:
    """Raises UsageError if the forward pass in the `with` block makes a weight."""
    before = {name for name, _ in module.named_parameters()}
    yield
    for name in [name for name, _ in module.named_parameters() if name not in before]:
        raise UsageError(
            f"the forward pass creates the weight {name}, which neither the optimizer nor another process has: make it "
            "in the constructor"
        )
