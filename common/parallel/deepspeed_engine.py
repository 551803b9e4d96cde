"""Steps through DeepSpeed's engine, and saving and loading of its state."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..data.sets import Batch
from ..errors import UsageError
from ..step.engine import Engine, StepResult
from ..step.optimizer_state import as_tensor, counts_on_device, optimizer_slots
from ..step.setup import Setup
from ..weights.shards import Shard, TensorReader, checkpoint_tensors

AVERAGE = "average"  # a slot of the optimizer state, so that DeepSpeed gathers and divides the moving averages


class _NotByElement(TorchFunctionMode):
    """Records the functions whose result differs in size from a shard, which has parts of several weights."""

    def __init__(self, sizes: Collection[int]):
        super().__init__()
        self._sizes, self.names = sizes, set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = next(iter(tree_leaves(args)), None), tree_leaves(result)
        size = given.numel() if isinstance(given, Tensor) else 0
        is_by_element = all(each.numel() == size if isinstance(each, Tensor) else each is None for each in made)
        if size in self._sizes and not is_by_element and not isinstance(result, bool):
            name = getattr(function, "__name__", str(function))
            self.names.add(function.__self__.__name__ if name == "__get__" else name)  # such as shape
        return result


class DeepSpeedEngine(Engine):
    """Steps through DeepSpeed's engine, which holds the weights, averages gradients and clips."""

    model: Any  # DeepSpeed's engine around the module, made by `prepare`

    def __init__(self, setup: Setup, model: Any, optimizer: Any, weights: Mapping[str, Tensor]):
        """`weights`: with all digits, if DeepSpeed has rounded the model's before it copied them to float32."""
        self._frozen: dict[Tensor, Tensor] = {}  # {frozen weight or buffer: itself with all digits}
        for name, weight in checkpoint_tensors(model.module).items() if weights else ():
            if _is_trained(weight):
                _set_whole(weight, None, weights[name].to(setup.accelerator.device, torch.float32))
            else:
                self._frozen[weight] = weights[name]
        super().__init__(setup, model, optimizer)
        self._divides = True  # whether it divides the optimizer's tensors, at stages 1 and 2
        self._looks = False  # at the gradients of this step, and at what the optimizer computes
        self._not_by_element: set[str] | None = None  # functions in the optimizer's first step
        self._unwatched_step = self._own_optimizer.step
        self._own_optimizer.step = self._watched_step  # type: ignore[method-assign]
        # It takes a gradient that forward_step computes for the backward pass of the step, and divides and reduces it.
        begin = model._backward_prologue
        model._backward_prologue = lambda: begin() if model._running_engine_backward else None
        model._backward_prologue_per_tensor = lambda gradient: gradient
        self._order, self._first_order = 0, None  # checksums of the order in which gradients arrive
        for number, weight in enumerate(each for each in self.module.parameters() if each.requires_grad):
            weight.register_post_accumulate_grad_hook(partial(self._arrived, number.to_bytes(4, "big")))

    def _arrived(self, number: bytes, weight: Tensor) -> None:
        self._order = zlib.crc32(number, self._order)
        if self._looks:
            self.trained.note(weight)

    @cached_property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        return self.model.optimizer.optimizer

    @property
    def module(self) -> nn.Module:
        return self.model.module

    def _updated_tensors(self) -> list[Tensor]:
        return [flat for flat, _ in self._flat_states()]

    def _after_swap(self) -> None:
        """Copies the weights that the optimizer updates into the model, as DeepSpeed does after a step."""
        zero = self.model.optimizer
        if hasattr(zero, "update_lp_params"):  # stages 1 and 2
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small weights, which stay whole
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        self._looks = wants_norm
        return super().step(number, micro_batches, wants_norm)

    def _sums_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        self.model.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def _differentiate(self, loss: Tensor, scale: Tensor) -> None:
        """Raises UsageError if the gradients did not arrive in the order of the first pass of process 0. ZeRO adds them
        up in the order of arrival: it would add the gradients of different weights."""
        self._order = 0
        self.model.backward(loss * (scale * self.plan.accumulation))
        if self._first_order is None:
            orders: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(orders, self._order)
            self._first_order = orders[0]
        if self._order != self._first_order:
            raise UsageError(
                f"the forward pass of process {self.accelerator.process_index} takes a different path through the "
                "model than other passes, as with experts, or a penalty or detached layer that begins late, which ZeRO "
                "does not support: use --config_file accelerate_configs/ddp.yaml"
            )

    def _update(self, number: int, wants_norm: bool) -> tuple[Tensor | float | None, bool]:
        if wants_norm or self.plan.evaluates(number):  # an evaluation came before this step
            self._check_written()
        optimizer, hooks = self._own_optimizer, self._own_optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_post_hooks = type(hooks)()  # they would see the weights before the step
        with self._draws_for_all_weights(number):
            self.model.step()  # clips, and skips a step whose gradient is not finite
        optimizer._optimizer_step_post_hooks = hooks
        for hook in hooks.values() if self.model.was_step_applied() else ():
            hook(optimizer, (), {})
        if hooks:  # they may have written what the optimizer updates
            self._after_swap()
        return self.model.get_global_grad_norm() if self.model.was_step_applied() else torch.inf, False

    def _check_written(self) -> None:
        """Raises UsageError if the model's weights are not those of the last update, which replace them (ZeRO-1, 2)."""
        zero = self.model.optimizer
        for group, flat in enumerate(getattr(zero, "single_partition_of_fp32_groups", ())):
            own = zero.parallel_partitioned_bit16_groups[group][dist.get_rank(zero.real_dp_process_group[group])]
            if own.device == flat.device and not torch.equal(own, flat.to(own.dtype)):
                raise UsageError(
                    f"something besides the optimizer's step writes weights of the model; {self.plan.layout} would put "
                    "its own copies in their place: use --config_file accelerate_configs/fsdp2.yaml"
                )

    def _watched_step(self, *args: Any, **named: Any) -> Any:
        """The optimizer's step, with hooks. Raises UsageError if it begins to take, say, the norm of a shard."""
        if not self._looks:
            return self._unwatched_step(*args, **named)
        with _NotByElement({flat.numel() for flat in self._updated_tensors()}) as found:
            result = self._unwatched_step(*args, **named)
        self._not_by_element = found.names if self._not_by_element is None else self._not_by_element
        for name in sorted(found.names - self._not_by_element):
            raise UsageError(
                f"the optimizer, or a hook of its step, begins to use {name} of a tensor in which "
                f"{self.plan.layout} has parts of several weights; use --config_file accelerate_configs/ddp.yaml"
            )
        return result

    def shards(self) -> list[Shard]:
        """Like `Engine.shards`, but each tensor is whole; `get` gathers one tensor at a time."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_states()
        shards: list[Shard] = []
        flat, state = self._flat_states()[0]  # all weights have the same slots and step count
        for name, weight in self.saved_tensors().items():
            shape, holders = tuple(getattr(weight, "ds_shape", weight.shape)), self.holders(name)
            shards.append(Shard.gathered(f"model.{name}", shape, partial(self._whole, weight), holders))
            for slot, value in state.items() if _is_trained(weight) else ():
                key = f"average.{name}" if slot == AVERAGE else f"optimizer.{name}.{slot}"
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    get = partial(safe_get_full_optimizer_state, weight, slot)
                    shards.append(Shard.gathered(key, shape, get, holders))
                else:
                    number = as_tensor(self._own_optimizer, slot, value)
                    shards.append(Shard.whole(key, number.float() if slot == "step" else number, holders))
        return shards

    def _link_states(self) -> None:
        """Links the optimizer state, with the averages as a slot of it, to the weights. ZeRO-1 and 2 (0.19) do so after
        the first parameter group of their first step: the others have no state yet, and stay without a link."""
        zero = self.model.optimizer
        if self.ema is not None:
            for flat, state in self._flat_states():
                state[AVERAGE] = self.ema.averages[flat]
        if hasattr(zero, "_hp_optimizer_states_linked"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _flat_states(self) -> list[tuple[Tensor, dict]]:
        """The flat shards that DeepSpeed's inner optimizer updates, each with its optimizer state."""
        zero = self.model.optimizer
        # The names in stage 3, in stages 1 and 2, and in stage 1 with bf16.
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        flats = next(getattr(zero, name) for name in names if hasattr(zero, name))
        return [(flat, zero.optimizer.state[flat]) for flat in flats]

    def load_parts(self, reader: TensorReader) -> None:
        saved, found = self.saved_tensors(), optimizer_slots(reader)
        weights = {name: weight for name, weight in saved.items() if _is_trained(weight)}
        slots = {f"optimizer.{name}.{slot}": (weights[name], slot) for name in weights for slot in found.get(name, [])}
        if self.ema is not None:
            slots |= {f"average.{name}": (weight, AVERAGE) for name, weight in weights.items()}
        zero = self.model.optimizer
        counts_in_numbers = type(zero.optimizer).__module__.startswith("deepspeed")
        for flat, state in self._flat_states():
            for key, (_, slot) in slots.items():
                if slot == "step":
                    count = reader.tensor(key).to(flat.device if counts_on_device(zero.optimizer) else "cpu")
                    state[slot] = int(count) if counts_in_numbers else count
                elif not reader.tensors[key]["shape"]:
                    state[slot] = reader.tensor(key)
                elif slot not in state:
                    state[slot] = torch.zeros_like(flat)
        if slots:
            self._link_states()
        for key, (weight, slot) in slots.items():
            if slot != "step" and reader.tensors[key]["shape"]:
                _set_whole(weight, slot, reader.tensor(key).to(self.device))

    def _whole(self, tensor: Tensor) -> Tensor:
        import deepspeed

        now = tensor
        if isinstance(tensor, nn.Parameter):
            if tensor.requires_grad and (whole := deepspeed.utils.safe_get_full_fp32_param(tensor)) is not None:
                return whole
            with deepspeed.zero.GatheredParameters([tensor]):  # DeepSpeed keeps no float32 copy of frozen weights
                now = tensor.detach().float().clone()
        whole = self._frozen.get(tensor, now).to(now.device)
        return whole.where(whole.to(tensor.dtype) == now, now)  # unless the recipe has written it


def _is_trained(tensor: Tensor) -> TypeGuard[nn.Parameter]:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _set_whole(weight: Any, slot: str | None, value: Tensor) -> None:
    """Sets a weight, or with `slot` its optimizer state, from a whole tensor."""
    from deepspeed import utils

    kind = "full"
    if hasattr(weight, "ds_tensor"):  # ZeRO-3: safe_set_full fails if the weight needs padding
        kind, size, rank = "local", weight.ds_tensor.numel(), dist.get_rank(weight.ds_process_group)
        share = value.flatten()[rank * size : (rank + 1) * size]
        value = torch.nn.functional.pad(share, (0, size - share.numel()))
    if slot is None:
        getattr(utils, f"safe_set_{kind}_fp32_param")(weight, value)
    else:
        getattr(utils, f"safe_set_{kind}_optimizer_state")(weight, value, slot)
