"""Runs a recipe whose processes share one GPU: each collective goes through the CPU, over gloo.

    RECIPE=recipes/mnist.py accelerate launch --config_file accelerate_configs/fsdp2.yaml tests/support/one_device.py

NCCL refuses two processes on one GPU. Here each process is a machine of its own, with the same GPU, and a dispatch mode
copies what a collective sends to the CPU, and what it receives back. So a run shows wrong devices, replicas that drift
apart, and what `fit` makes of both. It does not show what NCCL does, or what overlaps. Without a GPU the same
code sends copies of what is on the CPU. It ran on an H200 on 2026-11-28 (docs/gpu.md).
"""

import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork, Work, _create_work_from_future
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
SPACES = ("c10d", *FUNCTIONAL)
SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class ThroughTheCpu(TorchDispatchMode):
    """Takes each collective of tensors on a device with copies on the CPU.

    Args:
        copies_all: also those of tensors on the CPU, so that a machine without a GPU runs the same code.

    Attributes:
        taken: {collective: how many}.
    """

    def __init__(self, copies_all: bool):
        super().__init__()
        self.copies_all, self.taken = copies_all, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        away = self.copies_all or any(tensor.device.type != "cpu" for tensor in tensors)
        name = func.__name__.partition(".")[0]
        if func.namespace not in SPACES or not tensors or not away or name in SENDS_NOTHING:
            return func(*args, **(kwargs or {}))
        self.taken[name] += 1
        copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors}
        if name.endswith("_base_"):  # NCCL asks for as many numbers as it sends, gloo for the same shape, too
            copies = {key: copy.flatten() for key, copy in copies.items()}
        args, kwargs = tree_map_only(Tensor, lambda tensor: copies[id(tensor)], (args, kwargs or {}))
        if func.namespace in FUNCTIONAL:
            return self._functional(func, name, args, kwargs, tensors, copies)
        result = func(*args, **kwargs)
        if name == "send":  # nothing comes back, and the other side may wait before it receives
            return result
        works = [leaf for leaf in tree_leaves(result) if isinstance(leaf, ScriptObject)]

        def receive(timeout: timedelta) -> bool:
            for work in works:
                Work.unbox(work).wait()
            _copy_back(tensors, copies)
            return True

        if name.startswith("recv"):  # its sender may wait for what this process sends afterwards
            return PythonCallbackWork(receive).boxed()
        receive(timedelta())
        originals = {id(copies[id(tensor)]): tensor for tensor in tensors}
        result = tree_map_only(Tensor, lambda copy: originals[id(copy)], result)
        return tree_map_only(ScriptObject, lambda _: _finished(tensors).boxed(), result)

    def _functional(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], copies: Any) -> Any:
        """Those of `torch.distributed._functional_collectives`, which return new tensors: DTensor's."""
        args, number = list(args), 1
        for place, value in enumerate(args):
            if value == "avg":  # which gloo does not know
                args[place], number = "sum", _resolve_process_group(args[-1]).size()

        def back(found: Tensor) -> Tensor:
            return (torch.ops._c10d_functional.wait_tensor(found) / number).to(tensors[0].device, found.dtype)

        result = tree_map_only(Tensor, back, func(*args, **kwargs))
        if name.endswith("_"):  # in place
            _copy_back(tensors, {id(tensor): new for tensor, new in zip(tensors, tree_leaves(result))})
            return tensors[0] if isinstance(result, Tensor) else tensors
        return result


def _copy_back(tensors: Iterable[Tensor], copies: dict[int, Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().copy_(copies[id(tensor)].view_as(tensor))


def _finished(tensors: list[Tensor]) -> Work:
    """Of a collective that has ended. DDP takes its result from there."""
    devices = sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)
    future = torch.futures.Future(devices=devices)
    future.set_result(tensors)
    return _create_work_from_future(future)


def share_one_device() -> None:
    """Before `start`: each process is a machine with this device, and all groups are gloo's."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if "LOCAL_RANK" in os.environ else {}
    os.environ.update(alone | {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": size})
    begin = dist.init_process_group

    def over_gloo(*_: Any, **named: Any) -> None:
        begin(**{name: value for name, value in named.items() if name != "device_id"} | {"backend": "gloo"})

    dist.init_process_group = over_gloo


if __name__ == "__main__":
    recipe = os.environ["RECIPE"]
    share_one_device()
    sys.path[0], sys.argv[0] = str(Path(recipe).parent), recipe
    with ThroughTheCpu(not torch.cuda.is_available()) as mode:
        try:
            runpy.run_path(recipe, run_name="__main__")
        finally:
            if os.environ.get("RANK", "0") == "0":
                print("through the CPU:", ", ".join(f"{name} {number}" for name, number in sorted(mode.taken.items())))
