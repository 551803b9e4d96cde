"""Finds what objects refer to, and restores it."""

import functools
import gc
import io
import logging
import random
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from torch import Tensor

from ..package import is_own

LARGE = 2**28  # the most bytes to copy of tensors outside model and optimizer, and of an array
ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
# Python's modules with objects, besides containers, in which other code stores values.
OPEN = (
    "_thread",
    "argparse",
    "asyncio.queues",
    "builtins",
    "functools",
    "multiprocessing.sharedctypes",
    "queue",
    "types",
)
REGISTRIES = re.compile("_(parameters|buffers|modules|.*_hooks)")  # attributes of a layer that names leave out
HOOKS_OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
ITSELF = "the value"  # the name of an object's only part


class Entry:
    """The parts of an object that may change, {name: part}, and how to set them."""

    def __init__(self, name: str, read: Callable[[], dict], write: Callable[[dict], Any], is_generator: bool = False):
        self.name, self._read, self._write, self.is_generator = name, read, write, is_generator
        self.before = read()

    def find_changes(self, kinds: tuple[type, ...] = (), step: int | None = None) -> list[str]:
        """Names of the parts that have changed, but not to `step`; with `kinds` only of these types: not of flags."""
        now = self._read()
        keys = [key for key in {**self.before, **now} if not _is_same(self.before.get(key), now.get(key), step)]
        keys = [key for key in keys if not kinds or type(now.get(key)) in kinds]
        return list(dict.fromkeys(_join(self.name, key) for key in keys))

    def size(self) -> int:
        """How many parts it has now; of a list, how many items."""
        parts = self._read()
        items = parts.get(ITSELF)
        return len(items if isinstance(items, tuple) else parts)

    def give_back(self) -> None:
        now = self._read()
        if [*now] != [*self.before] or not all(map(_is_same, now.values(), self.before.values())):
            self._write(self.before)


def _is_same(value: Any, other: Any, step: int | None = None) -> bool:
    def is_kept(old: Any, new: Any) -> bool:
        return old is new or (type(new) is int and new == step)

    if type(value) is type(other) is tuple:
        return len(value) == len(other) and all(map(is_kept, value, other))
    return is_kept(value, other) or (isinstance(value, ATOMS) and type(value) is type(other) and value == other)


def _join(name: str, key: Any) -> str:
    if not isinstance(key, str) or REGISTRIES.fullmatch(key) or key == ITSELF:
        return name
    return f"{name}.{key}" if name else key


class Walk:
    """Finds what objects refer to."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # of objects that may change
        self.tensors: list[tuple[str, Tensor]] = []  # with their names
        self.iterators: list[tuple[str, Callable[[], bool]]] = []  # with their names, and whether they have advanced
        self.open: list[str] = []  # names of files and loggers
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no other gets one of these ids

    def visit(self, root: Any, besides: Any = None) -> tuple[int, int]:
        """Records all that `root` refers to, but not `besides`. Returns the numbers of entries and tensors."""
        waiting = [("", root)]
        while waiting:
            name, value = waiting.pop()
            if not isinstance(value, ATOMS) and value is not besides and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += [(_join(name, key), part) for key, part in self._parts(name, value)]
        return len(self.entries), len(self.tensors)

    def _parts(self, name: str, value: Any) -> list[tuple[Any, Any]]:  # noqa: C901, PLR0911, PLR0912  # a kind per line
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
            hooks = self._fields(name, value, HOOKS_OF_WEIGHTS) if value.is_leaf else []
            return [("", value.grad if value.is_leaf else None), *hooks, *self._attributes(name, value)]
        if isinstance(value, dict):
            found = self._note(name, lambda: dict(value), partial(_refill, value))
            return [*found, *_objects(value), *self._attributes(name, value)]
        if isinstance(value, list | set | deque):
            self._note(name, lambda: {ITSELF: tuple(value)}, partial(_refill_collection, value))
            return [*_objects(value), *self._attributes(name, value)]
        if isinstance(value, tuple | frozenset):
            return _objects(value)
        if isinstance(value, types.FunctionType):
            return self._of_function(name, value)
        if isinstance(value, types.MethodType):
            return [("self", value.__self__), ("", value.__func__)]
        if isinstance(value, partial):
            return [("", value.func), ("", value.args), ("", value.keywords)]
        if isinstance(value, types.ModuleType):
            is_made = type(value) is types.ModuleType and value.__spec__ is None  # by the recipe; not torch.ops
            is_users = is_made or is_own(getattr(value, "__file__", None) or "<frozen>")
            return self._fields(name, value) if is_users else []
        if isinstance(value, type):
            is_users = is_own(getattr(sys.modules.get(value.__module__), "__file__", None) or "<frozen>")
            behind = _objects((type(value), *value.__bases__))
            return [*self._fields(value.__name__, value), *behind] if is_users else []
        if isinstance(value, weakref.ref):
            return [("", value())]
        if isinstance(value, ContextVar):
            return self._of_variable(name, value)
        if isinstance(value, functools._lru_cache_wrapper):
            return self._of_cache(name, value)
        if isinstance(value, numpy.ndarray) and value.nbytes <= LARGE:
            values = value.copy()
            self._note(name, lambda: {ITSELF: value.tobytes()}, lambda before: numpy.copyto(value, values))
            return _objects(value.ravel().tolist()) if value.dtype.hasobject else []
        if isinstance(value, io.StringIO | io.BytesIO):
            return self._note(name, lambda: {ITSELF: value.getvalue(), "end": value.tell()}, partial(_rewrite, value))
        if _is_memory(value):
            read = lambda: {ITSELF: memoryview(value).tobytes()}  # noqa: E731
            return [*self._note(name, read, partial(_set_memory, value)), *self._attributes(name, value)]
        if (generator := _generator(value)) is not None:
            self.entries.append(Entry(name, *generator, is_generator=True))
            return []
        if hasattr(value, "__next__") and not hasattr(value, "__dict__") and not hasattr(value, "__slots__"):
            before = _position(value)
            self.iterators.append((name, lambda: _position(value) != before))
            return [] if isinstance(value, types.GeneratorType) else _objects(gc.get_referents(value))
        self.open += [name] * isinstance(value, io.IOBase | logging.Logger)
        if isinstance(value, Accelerator | types.FrameType | types.TracebackType) or _serves_python(value):
            return []
        named = [vars(each).get("__slots__", ()) for each in type(value).__mro__]
        slots = [slot for each in named for slot in ([each] if isinstance(each, str) else each)]
        fields = self._fields(name, value, slots) if slots else []
        return [*self._attributes(name, value), *fields, *_objects(gc.get_referents(value))]  # and what C code holds

    def _note(self, name: str, read: Callable[[], dict], write: Callable[[dict], Any]) -> list[tuple[Any, Any]]:
        self.entries.append(Entry(name, read, write))
        return list(self.entries[-1].before.items())

    def _attributes(self, name: str, value: Any) -> list[tuple[Any, Any]]:
        if not isinstance(attributes := getattr(value, "__dict__", None), dict):
            return []
        return self._note(name, lambda: dict(attributes), partial(_refill, attributes))

    def _fields(self, name: str, value: Any, names: Iterable[str] | None = None) -> list[tuple[Any, Any]]:
        """The parts that only `setattr` can set, in a class, a module, or an object with slots."""

        def read() -> dict[str, Any]:
            own = [key for key in vars(value) if not key.startswith("__")] if names is None else names
            return {key: _raw(value, key) for key in own if _raw(value, key) is not ITSELF}

        def write(before: dict[str, Any]) -> None:
            for key in {**before, **read()}:
                if key not in before:
                    delattr(value, key)
                elif _raw(value, key) is not before[key]:
                    setattr(value, key, before[key])

        return self._note(name, read, write)

    def _of_variable(self, name: str, value: ContextVar) -> list[tuple[Any, Any]]:
        def read() -> dict[str, Any]:
            with suppress(LookupError):  # it is not set yet
                return {ITSELF: value.get()}
            return {}

        if not (found := self._note(name, read, lambda before: before and value.set(before[ITSELF]))):
            self.iterators.append((name, lambda: bool(read())))  # a value, once set, cannot be removed
        return found

    def _of_cache(self, name: str, value: Any) -> list[tuple[Any, Any]]:
        """The references and results of a cached function. An unbounded cache keeps these in a dict. A bounded cache
        keeps them in a linked list, which can only be cleared; it is not cleared if it had results before."""
        if not is_own(getattr(getattr(value.__wrapped__, "__code__", None), "co_filename", "<frozen>")):
            return []
        results = next(each for each in gc.get_referents(value) if type(each) is dict and each is not vars(value))
        has_bound = value.cache_parameters()["maxsize"] is not None
        write = (lambda before: before or value.cache_clear()) if has_bound else partial(_refill, results)
        self._note(name, lambda: dict(results), write)
        return [("", value.__wrapped__), *_objects(gc.get_referents(value))]

    def _of_function(self, name: str, value: types.FunctionType) -> list[tuple[Any, Any]]:
        """For a user's function, its closure, defaults, attributes and the globals that it names. For any other, such
        as a package's decorator, the functions that it wraps."""
        if not is_own(value.__code__.co_filename):
            inner = [part for cell in value.__closure__ or () for part in _of_cell(cell).values()]
            return [(None, part) for part in inner if isinstance(part, types.FunctionType | types.MethodType)]
        found: list[tuple[Any, Any]] = [("", value.__defaults__), ("", value.__kwdefaults__)]
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            found += self._note(variable, partial(_of_cell, cell), partial(_fill_cell, cell))
            found += [(variable, part) for part in _of_cell(cell).values()]
        used, space = _names(value.__code__), value.__globals__
        read = lambda: {name: space[name] for name in used if name in space}  # noqa: E731
        found += self._note("", read, partial(_set_named, space, used))
        found += [(name, sys.modules[name]) for name in used - space.keys() if name in sys.modules]  # imported in here
        return [*found, *self._attributes(name or value.__name__, value)]


def _objects(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(None, value) for value in values if not isinstance(value, ATOMS)]


def _refill(mapping: dict, before: dict) -> None:
    mapping.clear()  # in place: the handle that removes a hook refers to its dict
    mapping.update(before)


def _refill_collection(collection: Any, before: dict[str, tuple]) -> None:
    collection.clear()
    getattr(collection, "update" if isinstance(collection, set) else "extend")(before[ITSELF])


def _rewrite(stream: Any, before: dict[str, Any]) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(before[ITSELF])
    stream.seek(before["end"])


def _of_cell(cell: types.CellType) -> dict[str, Any]:
    with suppress(ValueError):  # not assigned yet
        return {ITSELF: cell.cell_contents}
    return {}


def _fill_cell(cell: types.CellType, before: dict[str, Any]) -> None:
    if before:
        cell.cell_contents = before[ITSELF]
    else:
        del cell.cell_contents


def _set_named(space: dict[str, Any], names: set[str], before: dict[str, Any]) -> None:
    for name in names - before.keys():
        space.pop(name, None)
    space.update(before)


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and those inside it use."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _raw(value: Any, key: str) -> Any:
    """An attribute as it is stored, for a class without binding it; ITSELF if there is none."""
    return vars(value).get(key, ITSELF) if isinstance(value, type) else getattr(value, key, ITSELF)


def _generator(value: Any) -> tuple[Callable[[], dict], Callable[[dict], Any]] | None:
    """How to read and set the state of a random generator; None for anything else."""
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    if isinstance(value, numpy.random.Generator | numpy.random.BitGenerator):
        bits: Any = getattr(value, "bit_generator", value)
        get, put = lambda: bits.state, partial(setattr, bits, "state")
    elif isinstance(value, random.Random):
        get, put = value.getstate, value.setstate
    elif isinstance(value, torch.Generator | numpy.random.RandomState):
        get, put = value.get_state, value.set_state
    else:
        return None
    state: Any = get()

    def read() -> dict[str, Any]:
        now = get()  # a new object each time: compare its text or its bytes
        return {ITSELF: now.numpy().tobytes() if isinstance(now, Tensor) else repr(now)}

    return read, lambda before: put(state)


def _position(iterator: Any) -> Any:
    """A value that changes when an iterator advances."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals), _position(iterator.gi_yieldfrom))
    with suppress(TypeError):
        return repr(iterator.__reduce__())
    return repr(iterator)


def _is_memory(value: Any) -> bool:
    """Whether an object is an array of numbers that can be written, such as one of `array` or multiprocessing."""
    with suppress(TypeError):
        view = memoryview(value)
        return not view.readonly and view.nbytes <= LARGE
    return False


def _set_memory(value: Any, before: dict[str, bytes]) -> None:
    if memoryview(value).nbytes != len(before[ITSELF]):
        del value[:]
        (value.extend if isinstance(value, bytearray) else value.frombytes)(before[ITSELF])
    else:
        numpy.frombuffer(value, numpy.uint8)[:] = numpy.frombuffer(before[ITSELF], numpy.uint8)


def _serves_python(value: Any) -> bool:
    """Whether an object is Python's own, such as a thread, a file or a logger, which other code may use."""
    module = type(value).__module__
    is_python = module.partition(".")[0] in sys.stdlib_module_names
    return is_python and module not in OPEN and not isinstance(value, CONTAINERS)
