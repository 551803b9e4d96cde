"""Saves the values of the user's objects while one process trains with them, and restores them afterwards."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..weights.on_disk import is_lent
from ..weights.shards import checkpoint_tensors
from .walk import LARGE, Entry, Walk


class NotChecked(Exception):
    """The check is not possible; the message says why."""


@dataclass
class Changes:
    """The changes of the `with` block of `kept`, besides weights, buffers and the optimizer."""

    # Names of variables, attributes and tensors that the recipe's functions refer to, and of numbers in layers.
    names: list[str] = field(default_factory=list)
    in_model: list[str] = field(default_factory=list)  # the same for what layers hold: state, or a cache
    in_optimizer: list[str] = field(default_factory=list)  # for what it and its hooks hold, besides its state
    # {name of what layers hold: number of its parts}, counted at the call
    sizes: Callable[[], Counter[str]] = field(default=Counter, compare=False)
    generators: list[str] = field(default_factory=list)  # generators that these draw from, besides the global ones
    lost: list[str] = field(default_factory=list)  # iterators that advanced, and large tensors: they cannot be restored
    files: list[str] = field(default_factory=list)  # files that were opened for writing
    step: int | None = None  # the number that `forward_step` got last: what changed to it does not count calls
    # {name of a tensor: (its name, the name of another tensor with the same data)}
    sharing: dict[str, tuple[str, str]] = field(default_factory=dict)
    forget: Callable[[], None] = field(default=lambda: None, compare=False)  # gives back what no checkpoint stores

    def all_names(self) -> list[str]:
        found = dict.fromkeys([*self.names, *self.in_model, *self.in_optimizer, *self.generators])
        return [name for name in found if name.rpartition(".")[2] != "training"]  # which each pass sets


@contextmanager
def kept(
    model: nn.Module, optimizer: torch.optim.Optimizer, functions: Iterable[Any], device: torch.device
) -> Iterator[Changes]:
    """Within the `with` block these objects train on the device; afterwards they are restored.

    Tensors that share memory still share it. Afterwards weights, buffers, gradients, optimizer state, flags,
    attributes, hooks, closures, globals of the recipe and generators are as before. Raises NotChecked if a weight
    cannot be copied, or an object cannot be read. `model`: whole, on the CPU; `functions`: the recipe's.
    """
    walk, changes = Walk(), Changes()
    moving = {id(each) for each in (*model.parameters(), *model.buffers())}
    try:  # all copies first: if one fails, nothing has changed
        of_model = walk.visit(model, optimizer)  # to which the model may refer
        saved = {id(each) for each in (*model.parameters(), *checkpoint_tensors(model).values())}
        stored = walk.visit([optimizer.state, optimizer.param_groups])
        saved |= {id(tensor) for _, tensor in walk.tensors[of_model[1] :]}
        of_training = walk.visit(optimizer)
        moving |= {id(tensor) for _, tensor in walk.tensors[of_model[1] :] if tensor.ndim > 0}  # not counts of steps
        of_hooks = {id(tensor) for _, tensor in walk.tensors[stored[1] :]}
        spaces = vars(nn.modules.module) | vars(sys.modules[torch.optim.Optimizer.__module__])
        of_all = [each for key, each in spaces.items() if key.startswith("_global_") and "hooks" in key]
        for root in (*functions, *of_all):  # the hooks of all modules and of all optimizers, too
            walk.visit(root)
        changes.sharing = _sharing(walk.tensors)
        own, others = walk.entries[: of_model[0]], walk.entries[of_training[0] :]
        hooks = walk.entries[stored[0] : of_training[0]]  # of the optimizer, and its attributes
        lending = _Lending(walk.tensors, of_training[1], moving, saved, device)
        changes.sizes, changes.forget = partial(_sizes, own), partial(_forget, model, own + others + hooks, lending)
    except Exception as error:  # too little memory, a tensor without a storage, or any object of any package
        raise NotChecked(f"model and optimizer cannot be copied: {first_line(error)}") from None
    for each in lending.tensors:
        if each.elsewhere is not None:
            each.tensor.data = each.elsewhere
        each.version = each.tensor._version
    try:
        with _noted_files(changes.files):
            yield changes
    finally:
        written = [each for each in lending.tensors if not each.is_saved and lending.has_changed(each)]
        changes.in_optimizer += [each.name for each in written if id(each.tensor) in of_hooks]
        changes.names += _changed(others, step=changes.step)
        changes.names += [each.name for each in written if id(each.tensor) not in of_hooks]
        changes.names += [name for entry in own for name in entry.find_changes((int, float), changes.step)]
        changes.in_optimizer += [name for each in hooks for name in each.find_changes((int, float, tuple))]
        changes.in_model += _changed(own)
        changes.generators += _changed(others, of_generators=True) + _changed(own, of_generators=True)
        changes.lost += [name for name, moved in walk.iterators if moved()]
        changes.lost += [each.name for each in written if not each.is_copied]
        lending.give_back()
        for entry in walk.entries:
            entry.give_back()


def _sizes(entries: Iterable[Entry]) -> Counter[str]:
    found = Counter[str]()
    for each in entries:
        found[each.name] += each.size()
    return found


def _forget(model: nn.Module, entries: Iterable[Entry], lending: "_Lending") -> None:
    modules = [(each, each.training, dict(each._buffers)) for each in model.modules()]
    forward = {name: each for name, each in vars(model).items() if name == "forward"}  # with the reference's autocast
    for entry in entries:
        entry.give_back()
    lending.forget()
    vars(model).update(forward)
    for module, is_training, buffers in modules:
        module.training, lost = is_training, getattr(module, "_non_persistent_buffers_set", ())
        module._buffers.update((name, buffer) for name, buffer in buffers.items() if name not in lost)


def _changed(entries: Iterable[Entry], of_generators: bool = False, step: int | None = None) -> list[str]:
    return [name for each in entries if each.is_generator == of_generators for name in each.find_changes(step=step)]


@dataclass
class _Lent:
    """A tensor that the block may change. `is_saved`: a checkpoint stores it; `is_copied`: its data are restored;
    `elsewhere`: the data that the block uses instead, perhaps on a device; None: its own, which arrays may share."""

    name: str
    tensor: Tensor
    is_saved: bool
    is_copied: bool
    elsewhere: Tensor | None
    data: Tensor
    gradient: Tensor | None
    wants_gradient: bool
    version: int = 0


class _Lending:
    """Tensors that the block may change, and copies of their data."""

    def __init__(
        self, tensors: list[tuple[str, Tensor]], trained: int, moving: set[int], saved: set[int], device: torch.device
    ):
        """Copies these tensors' data; the tensors whose ids are in `moving` work on the device, and a checkpoint stores
        those in `saved`. After the first `trained` tensors it copies at most `LARGE` bytes."""
        self.tensors: list[_Lent] = []
        self._moved: dict[int, torch.UntypedStorage] = {}  # {address of a storage: its replacement}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (it, its copy)
        strided = [each for _, each in tensors if each.layout is torch.strided and id(each) in saved]
        self._own = {each.untyped_storage()._cdata for each in strided}
        room = LARGE
        for number, (name, tensor) in enumerate(tensors):
            if tensor.is_inference():  # nothing can write it
                continue
            is_strided, elsewhere = tensor.layout is torch.strided, None
            room -= tensor.nbytes if is_strided and number >= trained else 0
            if is_copied := number < trained or (is_strided and room >= 0):
                elsewhere = self._copied(tensor, device if id(tensor) in moving else tensor.device)
            gradient = tensor.grad if tensor.is_leaf else None
            given = (name, tensor, id(tensor) in saved, is_copied, elsewhere)
            self.tensors.append(_Lent(*given, tensor.data, gradient, tensor.requires_grad))

    def _copied(self, tensor: Tensor, device: torch.device) -> Tensor | None:
        storage = tensor.untyped_storage()
        if device == tensor.device and not is_lent(tensor):
            if storage._cdata not in self._before and not tensor.is_meta:
                self._before[storage._cdata] = storage, storage.clone()
            return None
        if storage._cdata not in self._moved:
            self._moved[storage._cdata] = storage.clone() if device == tensor.device else storage.to(device=device)
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(self._moved[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    def has_changed(self, lent: _Lent) -> bool:
        """Whether it was written, unless a checkpoint stores its data. `.data` writes without a new version."""
        key = lent.data.untyped_storage()._cdata if lent.data.layout is torch.strided else 0
        if key in self._own or lent.tensor._version != lent.version:
            return key not in self._own
        return key in self._before and not torch.equal(*map(_bytes, self._before[key]))

    def forget(self) -> None:
        """Gives the tensors their first data, but not those whose data a checkpoint stores."""
        for key, (storage, before) in self._before.items():
            is_written = key not in self._own and not torch.equal(_bytes(storage), _bytes(before))
            if is_written and storage.nbytes() == before.nbytes():  # a mapped file may be read-only
                storage.copy_(before)
        for each in self.tensors:
            if each.elsewhere is not None and each.data.untyped_storage()._cdata not in self._own:
                each.elsewhere.copy_(each.data)

    def give_back(self) -> None:
        for storage, before in self._before.values():
            if not torch.equal(_bytes(storage), _bytes(before)):  # a mapped file may be read-only
                if storage.nbytes() != before.nbytes():
                    storage.resize_(before.nbytes())
                storage.copy_(before)
        for each in self.tensors:
            each.tensor.data = each.data
            if each.tensor.is_leaf:
                each.tensor.grad = each.gradient
                each.tensor.requires_grad_(each.wants_gradient)


_noting: list[list[str]] = []  # lists of files; only the last one grows
_alone: list[int] = []  # threads that may change nothing outside of Python
OUTSIDE = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "socket.connect", "subprocess.Popen")


@cache
def _listen() -> None:
    def note(event: str, given: tuple) -> None:
        is_write = event == "open" and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
        if _alone and (is_write or event in OUTSIDE) and threading.get_ident() in _alone:
            raise NotChecked(f"it changes more than Python's objects: {event}")
        if _noting and is_write and not isinstance(given[0], int):
            path = os.fsdecode(given[0])
            _noting[-1] += [path] * (".pyc" not in path and not path.startswith("/dev/"))

    sys.addaudithook(note)  # it cannot be removed


@contextmanager
def _noted_files(files: list[str]) -> Iterator[None]:
    """Adds to a list the files that Python opens for writing in the `with` block; a number stands for an open pipe."""
    _listen()
    _noting.append(files)
    try:
        yield
    finally:
        _noting.pop()


@contextmanager
def unheard() -> Iterator[None]:
    """In the `with` block nothing is printed, and an attempt of this thread to write a file, start a program or send
    something raises NotChecked."""
    _listen()
    _alone.append(threading.get_ident())
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        _alone.pop()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _sharing(tensors: list[tuple[str, Tensor]]) -> dict[str, tuple[str, str]]:
    first, pairs = dict[int, str](), dict[str, tuple[str, str]]()
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            other = first.setdefault(tensor.data_ptr(), name)
            if other != name:
                pairs[name] = pairs[other] = (other, name)
    return pairs
