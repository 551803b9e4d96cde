"""The same order of layers in all processes."""

import itertools
import time
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..data.sets import Batch, NumberedStep
from ..errors import UsageError
from ..plan import Plan

MOST_CALLS = 8  # of a layer in a pass that are told apart; a generated text has hundreds


class SamePath:
    """Ends the run if processes call different layers under FSDP2 or ZeRO-3, which gather at each call. A call is free
    if the same one has always followed the call before it; otherwise all must make it."""

    _runs = itertools.count()  # in this process; the same in all processes, whose keys stay in the store

    def __init__(self, model: nn.Module, plan: Plan):
        self._keys = f"path/{next(self._runs)}/{plan.layout.rank % plan.layout.model_parallel_size}"
        self._layout, self._again = plan.layout, plan.layout.environment.gathers_again
        self._seconds = plan.config.hang_timeout / 2 or 900.0
        self._next = defaultdict[tuple[bool, str, int], set[str]](set)  # what has followed a call
        self._pass, self._calls, self._last = 0, Counter[str](), ""
        self._is_in_pass = self._is_needed = False
        self._number, self._met = 0, ""  # of the last meeting, and what this process did there
        # ZeRO-3 gathers within the graphs of torch.compile, where this cannot be called.
        for name, module in model.named_modules():
            of_zero = any(hasattr(weight, "ds_id") for weight in module.parameters(recurse=False))
            if hasattr(module, "reshard") or (of_zero and not plan.config.compile):
                self._is_needed = True
                what = f"calls {name.removeprefix('module').lstrip('.') or 'the model'}"
                module.register_forward_pre_hook(partial(self._before, what), prepend=True)  # before it is gathered

    def __deepcopy__(self, memo: Any) -> "SamePath":
        return self  # of a model that the recipe copies

    def follow(self, values_of: NumberedStep) -> NumberedStep:
        """Wraps `forward_step`, if anything is gathered."""

        def followed(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
            self._pass, self._calls, self._last, self._is_in_pass = self._pass + 1, Counter(), "", True
            try:
                values = values_of(model, batch, number)
                self._do("ends")
                return values
            finally:
                self._is_in_pass = False

        return followed if self._is_needed else values_of

    def _before(self, what: str, *given: Any) -> None:
        is_again = torch._C._current_graph_task_id() != -1  # activation checkpointing, in the backward pass
        if self._is_in_pass and not is_again and (self._again or not self._calls[what]):
            self._do(what)

    def _do(self, what: str) -> None:
        known = self._next[torch.is_grad_enabled(), self._last, min(self._calls[self._last], MOST_CALLS)]
        if known != {what}:
            if (is_same := self._meet(f"{self._pass} {what}")) is not True:
                late = "" if is_same is False else f" within {self._seconds:g} s"
                after = f" after it {self._last}" if self._last else ""
                raise UsageError(
                    f"in a pass, this process {what}{after}, and not every process does{late}: {self._layout} gathers "
                    "the weights of a layer at each call: call the same layers in the same order for all samples, or "
                    "use --config_file accelerate_configs/ddp.yaml"
                )
            known.add(what)
        self._calls[what] += 1
        self._last = what

    def _meet(self, what: str) -> bool | None:
        """Whether all processes do this; None if one has not come in time."""
        store = dist.PrefixStore(self._keys, dist.distributed_c10d._get_default_store())
        size = self._layout.data_parallel_size
        self._number += 1
        all_, own, same = (f"{self._number}{name}" for name in ("", f" {what}", " same"))
        store.add(own, 1)
        if store.add(all_, 1) == size:
            store.set(same, str(store.add(own, 0) == size))
            for old in ("", self._met, " same"):  # of the meeting before, which all have left
                store.delete_key(f"{self._number - 1}{old}")
        self._met = f" {what}"
        ends, pause = time.monotonic() + self._seconds, 1e-3
        while time.monotonic() < ends:  # not the store's `wait`, which prints warnings
            if store.check([same]):
                return store.get(same) == b"True"
            time.sleep(pause := min(0.1, 1.5 * pause))
        return None
