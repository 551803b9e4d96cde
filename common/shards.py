"""What this process holds of weights and optimizer state, and how it is put back, whatever divides them."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist

from common.errors import UsageError
from common.step import Trainer
from common.storage import Part, Reader

if TYPE_CHECKING:  # its import takes 0.7 s
    from torch.distributed.tensor import DTensor


def full_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and saved buffers, whole and on the CPU, in the main process.

    All processes must call it together; the others gather and get nothing.
    """
    gathered, tensors = {}, parameters_and_buffers(trainer)
    if trainer.pipeline is not None:
        tensors = trainer.pipeline.gather(tensors)
    for name, tensor in tensors.items():
        if _is_divided(tensor):
            tensor = tensor.full_tensor()
        elif trainer.uses_deepspeed:
            tensor = _gathered_by_deepspeed(tensor)
        if trainer.accelerator.is_main_process:
            # A copy of its own: safetensors takes no tensors that share memory, as tied weights do.
            gathered[name] = tensor.detach().cpu().contiguous().clone()
    return gathered


def parameters_and_buffers(trainer: Trainer) -> dict[str, Tensor]:
    """What is saved of the module, as the optimizer knows it."""
    # Not named_parameters: after an evaluation FSDP2 shows gathered weights there, whose memory it
    # frees when it shards again, as it does before a state_dict.
    return trainer.module.state_dict(keep_vars=True)


def state_parts(trainer: Trainer) -> list[Part]:
    """Parts that this process holds of `model.<name>`, `optimizer.<name>.<slot>` and, with `--ema_decay`,
    `average.<name>`. Under DeepSpeed they are whole, gathered one after the other."""
    averages = {} if trainer.average is None else trainer.average.averages
    slots = _deepspeed_slots if trainer.uses_deepspeed else _slots
    parts = []
    for name, weight in parameters_and_buffers(trainer).items():
        if trainer.uses_deepspeed:
            shape = tuple(getattr(weight, "ds_shape", weight.shape))
            parts.append(Part.gathered(f"model.{name}", shape, partial(_gathered_by_deepspeed, weight)))
        else:
            # DDP takes the first process's buffers for the right ones.
            parts += _part(f"model.{name}", weight, of_first=not isinstance(weight, nn.Parameter))
        parts += slots(trainer, f"optimizer.{name}", weight)
        if weight in averages:
            parts += _part(f"average.{name}", averages[weight])
    return parts


def load_state(trainer: Trainer, reader: Reader) -> None:
    """Puts back the optimizer's state and the averages; the weights were loaded before `prepare`."""
    if trainer.uses_deepspeed:
        _load_deepspeed(trainer, reader)
        return
    slots: dict[str, list[str]] = {}
    for key in reader.tensors:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, slot = rest.rpartition(".")
            slots.setdefault(name, []).append(slot)
    optimizer = trainer.optimizer.optimizer
    on_device = _counts_on_device(optimizer)
    for name, weight in parameters_and_buffers(trainer).items():
        for slot in slots.get(name, []):
            key = f"optimizer.{name}.{slot}"
            kept = reader.tensor(key) if slot == "step" and not on_device else _placed_like(weight, reader, key)
            optimizer.state[weight][slot] = kept
        if trainer.average is not None and f"average.{name}" in reader.tensors:
            trainer.average.averages[weight] = _placed_like(weight, reader, f"average.{name}")


def _is_divided(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def _part(name: str, tensor: Tensor, of_first: bool = False) -> Iterator[Part]:
    if not _is_divided(tensor):
        yield Part.whole(name, tensor, of_first)
        return
    local, (offsets, sizes) = tensor.to_local(), _range(tensor)
    assert tuple(local.shape) == sizes, (name, local.shape, sizes)
    if local.numel() or not tensor.numel():
        yield Part(name, tuple(tensor.shape), offsets, sizes, lambda: local)


def _slots(trainer: Trainer, name: str, weight: Tensor) -> Iterator[Part]:
    for slot, value in trainer.optimizer.optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor):
            yield from _part(f"{name}.{slot}", value)
        elif value is not None:
            raise UsageError(
                f"{type(trainer.optimizer.optimizer).__name__} keeps {slot}, which is no tensor: checkpoints hold the "
                "state of torch's optimizers; remove --save_every, or take AdamW or SGD"
            )


def _counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """torch keeps the step count on the CPU unless the optimizer is fused or capturable."""
    return any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))


def _range(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of what this process holds of a DTensor."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    # From the last dimension of the mesh to the first, as tensor parallelism divided before FSDP2 did;
    # torch's own functions do not know that order where both divided one dimension.
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[dimension]
        if placement.is_shard() or hasattr(placement, "split_factor"):
            along, index = placement.dim, mesh.get_local_rank(dimension)
            chunk = -(-sizes[along] // mesh.size(dimension))
            start = min(index * chunk, sizes[along])
            offsets[along] += start
            sizes[along] = min(chunk, sizes[along] - start)
    return tuple(offsets), tuple(sizes)


def _placed_like(weight: Tensor, reader: Reader, name: str) -> Tensor:
    """What this process holds of a tensor on the disk, if it is divided as `weight` is."""
    shape = tuple(reader.tensors[name]["shape"])
    if shape != tuple(weight.shape):
        return reader.tensor(name).to(weight.device)
    if not _is_divided(weight):
        value = reader.tensor(name)
        return torch.empty_like(weight, dtype=value.dtype).copy_(value)  # fused kernels want its memory format, too
    from torch.distributed.tensor import DTensor

    local = reader.tensor(name, *_range(weight)).to(weight.device)
    strides = weight.stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=strides
    )


def _gathered_by_deepspeed(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor
    import deepspeed

    if tensor.requires_grad and (whole := deepspeed.utils.safe_get_full_fp32_param(tensor)) is not None:
        return whole
    with deepspeed.zero.GatheredParameters([tensor]):  # no float32 original is kept of a frozen one
        return tensor.detach().float().clone()  # nor of one that the optimizer was not given


def _flat_states(trainer: Trainer) -> list[tuple[Tensor, dict]]:
    """The parts of all weights in a row on which DeepSpeed's inner optimizer works, and its state of them."""
    zero = trainer.engine.optimizer
    # Of stage 3, of 1 and 2, and of 1 in bf16.
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    flats = next(getattr(zero, name) for name in names if hasattr(zero, name))
    return [(flat, zero.optimizer.state[flat]) for flat in flats]


def _deepspeed_slots(trainer: Trainer, name: str, weight: Tensor) -> Iterator[Part]:
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        return
    from deepspeed.utils import safe_get_full_optimizer_state

    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    flat, state = _flat_states(trainer)[0]  # all weights have the same slots and have taken as many steps
    for slot, value in state.items():
        if isinstance(value, Tensor) and value.shape == flat.shape:
            yield Part.gathered(f"{name}.{slot}", shape, partial(safe_get_full_optimizer_state, weight, slot))
        else:
            yield Part.whole(f"{name}.{slot}", torch.as_tensor(float(value)))


def _load_deepspeed(trainer: Trainer, reader: Reader) -> None:
    weights = {
        name: weight
        for name, weight in parameters_and_buffers(trainer).items()
        if isinstance(weight, nn.Parameter) and weight.requires_grad
    }
    prefixes = {f"optimizer.{name}": weight for name, weight in weights.items()}
    slots = {key: key.rpartition(".") for key in reader.tensors if key.rpartition(".")[0] in prefixes}
    zero = trainer.engine.optimizer
    counts_in_numbers = type(zero.optimizer).__module__.startswith("deepspeed")
    for flat, state in _flat_states(trainer):
        for key, (_, _, slot) in slots.items():
            if slot == "step":
                count = reader.tensor(key).to(flat.device if _counts_on_device(zero.optimizer) else "cpu")
                state[slot] = int(count) if counts_in_numbers else count
            elif slot not in state:
                state[slot] = torch.zeros_like(flat)
    if slots and hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()  # links the state to the weights, else the first step does
    for name, weight in weights.items():
        # In bf16 the engine made its float32 weights from rounded ones.
        _set_in_deepspeed(weight, None, reader.tensor(f"model.{name}").to(trainer.accelerator.device))
    for key, (prefix, _, slot) in slots.items():
        if slot != "step":
            value = reader.tensor(key).to(trainer.accelerator.device)
            _set_in_deepspeed(prefixes[prefix], slot, value)


def _set_in_deepspeed(weight: Any, slot: str | None, value: Tensor) -> None:
    """Sets a weight, or with `slot` its state in the optimizer, to a whole tensor."""
    from deepspeed import utils

    kind = "full"
    if hasattr(weight, "ds_tensor"):  # of ZeRO-3, whose safe_set_full fails where the processes do not divide it
        kind, size, rank = "local", weight.ds_tensor.numel(), dist.get_rank(weight.ds_process_group)
        share = value.flatten()[rank * size : (rank + 1) * size]
        value = torch.nn.functional.pad(share, (0, size - share.numel()))
    if slot is None:
        getattr(utils, f"safe_set_{kind}_fp32_param")(weight, value)
    else:
        getattr(utils, f"safe_set_{kind}_optimizer_state")(weight, value, slot)
