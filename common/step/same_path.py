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
from ..weights.shards import is_gathered

MOST_CALLS = 8  # of a layer in a pass that are told apart; a generated text has hundreds


class SamePath:
    """Ends the run if processes call different layers under FSDP2 or ZeRO-3, which gather a layer's weights at each
    call. A call costs nothing if the same one has always followed the call before it. Otherwise all must make it."""

    _runs = itertools.count()  # in this process; the same in all processes, whose keys stay in the store

    def __init__(self, model: nn.Module, plan: Plan):
        self._store = dist.PrefixStore(f"path/{next(self._runs)}", dist.distributed_c10d._get_default_store())
        self._plan, self._again = plan, plan.layout.environment.gathers_again
        self._next = defaultdict[tuple[bool, str, int], set[str]](set)  # what has followed a call
        self._pass, self._calls, self._last, self._is_in_pass = 0, Counter[str](), "", False
        self._number, self._met = 0, ""  # of the last meeting, and what this process did there
        for name, module in model.named_modules():
            if is_gathered(module):
                what = f"calls {name.removeprefix('module.') or 'the model'}"
                module.register_forward_pre_hook(partial(self._before, what), prepend=True)  # before it is gathered

    def __deepcopy__(self, memo: Any) -> "SamePath":
        return self  # of a model that the recipe copies

    def follow(self, values_of: NumberedStep) -> NumberedStep:
        """Wraps `forward_step`."""

        def followed(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
            self._pass, self._calls, self._last, self._is_in_pass = self._pass + 1, Counter(), "", True
            try:
                values = values_of(model, batch, number)
                self._do("ends")
                return values
            finally:
                self._is_in_pass = False

        return followed

    def _before(self, what: str, *given: Any) -> None:
        is_again = torch._C._current_graph_task_id() != -1  # activation checkpointing, in the backward pass
        if self._is_in_pass and not is_again and (self._again or not self._calls[what]):
            self._do(what)

    def _do(self, what: str) -> None:
        known = self._next[torch.is_grad_enabled(), self._last, min(self._calls[self._last], MOST_CALLS)]
        if known != {what}:
            if not self._meet(f"{self._pass} {what}"):
                after = f" after it {self._last}" if self._last else ""
                raise UsageError(
                    f"in a pass, this process {what}{after}, and not every process does: {self._plan.layout} gathers "
                    "the weights of a layer at each call, so the processes would wait for each other: call the same "
                    "layers in the same order for all samples, or use --config_file accelerate_configs/ddp.yaml"
                )
            known.add(what)
        self._calls[what] += 1
        self._last = what

    def _meet(self, what: str) -> bool:
        """Whether all processes do this."""
        store, size, longest = self._store, self._plan.layout.num_processes, self._plan.config.hang_timeout / 2
        self._number += 1
        all_, own, same = (f"{self._number}{name}" for name in ("", f" {what}", " same"))
        store.add(own, 1)
        if store.add(all_, 1) == size:
            store.set(same, str(store.add(own, 0) == size))
            for old in ("", self._met, " same"):  # of the meeting before, which all have left
                store.delete_key(f"{self._number - 1}{old}")
        self._met = f" {what}"
        ends, pause = time.monotonic() + min(300.0, longest or 300.0), 1e-3
        while time.monotonic() < ends:  # not the store's `wait`, which prints warnings
            if store.check([same]):
                return store.get(same) == b"True"
            time.sleep(pause := min(0.1, 1.5 * pause))
        return False
