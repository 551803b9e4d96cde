"""Counts where recipes make the CPU wait for a device: fake_device.py '[[PRECISION, RECIPE, FLAGS], ...]'.

The device does not exist: its tensors have a shape, a type and a place, but no values. The run's own code prepares the
model, fetches batches, steps and evaluates. For each case the script prints a line of JSON, with the waits of a step
after the first and of an evaluation: {place in the code: number}. Operations on tensors of two devices fail.

To show that it counts: `--plant` before the other flags reads each loss, `--mix` adds a tensor on the CPU to it.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.masking_utils
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_recipes.common import evaluation
from accelerate_recipes.common.command_line import parse
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.data.batches import batches, resident
from accelerate_recipes.common.data.mixed import parts_of
from accelerate_recipes.common.data.sets import check_datasets
from accelerate_recipes.common.evaluation import evaluate_set
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.common.stopping.watch import _Pending

ROOT = Path(__file__).parents[2]
NAME = "npu"  # of the kinds of devices that a run accepts, the one that torch does not know
NUM_STEPS = 2
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}  # what they return depends on values
COPIES = {"_to_copy", "copy_"}
LOWERED = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")  # by autocast
LIBRARIES = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


class Module(backend_registration._DummyBackendModule):
    """`torch.npu`"""

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device: torch.device) -> Tensor:  # CUDA keeps it on the CPU
        return torch.empty(0)

    def set_rng_state(self, state: Tensor, device: torch.device) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Waits(TorchDispatchMode):
    """Counts waits in `places`. Where the code reads a number of the device, it gets 0 or False."""

    places: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = operation.overloadpacket.__name__, kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        reads = name in READS and first is not None and first.device.type == NAME
        if reads or (name in COPIES and copy_waits(name, args, kwargs)):
            self.places[place()] += 1
        try:
            return operation(*args, **kwargs)
        except DataDependentOutputException:
            assert first is not None
            return float(not reads) if first.is_floating_point() else int(not reads)


def copy_waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """A copy between devices waits, unless it is asynchronous and the memory on the CPU is pinned."""
    target = args[0] if name == "copy_" else None
    source = args[0] if target is None else args[1]
    to = kwargs.get("device") or source.device if target is None else target.device
    if torch.device(to).type == source.device.type:
        return False
    asynchronous = kwargs.get("non_blocking") or (target is not None and args[2:] == (True,))
    return not asynchronous or not getattr(target if torch.device(to).type == "cpu" else source, "has_pin", False)


def place() -> str:
    """The last function of the project on the stack, and the last one of a package that it called."""
    stack = traceback.extract_stack()[:-2]
    own = max(number for number, frame in enumerate(stack) if is_own(Path(frame.filename)))
    called = [frame for frame in stack[own + 1 :] if "/torch/" not in frame.filename][-1:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in [stack[own], *called])


def is_own(file: Path) -> bool:
    """A file of the project, and not one of a virtual environment beside it."""
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


def add_device() -> None:
    """Makes torch, Accelerate and transformers believe in the device."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    PartialState.default_device = property(lambda self: torch.device(NAME, 0))
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    FakeTensor.tolist = lambda tensor: [value.item() for value in tensor.cpu()]  # type: ignore[method-assign]
    nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # `move` has moved it
    torch.Event = lambda device: SimpleNamespace(record=lambda: None)  # type: ignore[assignment,misc]
    torch.empty, torch.empty_like = pinning(torch.empty), pinning(torch.empty_like)
    transformers.masking_utils.is_tracing = lambda tensor=None: False  # it takes fake tensors for a compilation
    LIBRARIES[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in LOWERED:
        LIBRARIES[1].impl(name, functools.partial(lowered, getattr(torch.ops.aten, name)), "AutocastPrivateUse1")


def pinning(function: Any) -> Any:
    """Marks what the code wants in pinned memory."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        tensor.has_pin = pin_memory
        return tensor

    return made


def lowered(operation: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Autocast: the operation on the same tensors in 16 bits."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.get_autocast_dtype(NAME)) if is_float else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return operation(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def move(mode: FakeTensorMode, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replaces weights and buffers by tensors on the device."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in moved:
                    with mode:
                        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=NAME)
                    is_weight = isinstance(tensor, nn.Parameter)
                    moved[tensor] = nn.Parameter(new, tensor.requires_grad) if is_weight else new
                tensors[name] = moved.get(tensor)  # type: ignore[arg-type,assignment]
    for group in optimizer.param_groups:
        group["params"] = [moved[weight] for weight in group["params"]]


def measure(fault: str, accelerator: Any, model: Any, optimizer: Any, step: Any, *rest: Any, **more: Any) -> None:
    """In place of `fit`: prints the waits, and ends the recipe."""

    def faulty_step(model: nn.Module, batch: Any) -> Any:
        values = step(model, batch)
        terms = {"--plant": lambda: values["loss"].sum().item(), "--mix": lambda: torch.ones(1)}
        return values | {"loss": values["loss"] + terms[fault]()} if fault else values

    train_set, eval_sets = check_datasets(rest[0], rest[1], more.get("collate_fn"))
    plan = Plan.of(rest[2], accelerator.layout, len(train_set), None, None)
    samples = list(islice(plan.micro_batches(0), NUM_STEPS))
    mode, waits, device = FakeTensorMode(allow_non_fake_inputs=True), Waits(), accelerator.device
    if accelerator.scaler is not None:  # Accelerate takes an unknown device for CUDA
        accelerator.scaler = torch.amp.GradScaler(NAME)
    move(mode, model, optimizer)
    with mode, waits:
        engine = prepare(Setup(accelerator, model, optimizer, faulty_step, plan, more.get("batch_loss")))
        engine.draws = False  # else the first step reads the states of generators, which have no values here
        stream, eval_set = batches(train_set, samples, device, rest[2]), resident(eval_sets[""], device)
        for number in range(NUM_STEPS):
            waits.places = Counter()
            result = engine.step(number, [next(stream)], wants_norm=True)
            _Pending(number, False, [*result.losses, result.grad_norm], CpuGroup(0), device)  # type: ignore[list-item]
        found, waits.places = waits.places, Counter()
        evaluate_set(engine, eval_set, lambda: False, "examples" in more)
    print(json.dumps({"step": found, "evaluation": waits.places}), flush=True)
    raise SystemExit


def without_reference(*data: Any) -> None:
    """In place of `add_reference`, whose values a device without values cannot give."""
    for one in parts_of(data[4], data[5]):
        one.reference = torch.zeros(len(one), 2)


def main(cases: list[list[str]]) -> None:
    add_device()
    for precision, script, flags in cases:
        words = flags.split()
        fault = words.pop(0) if {"--plant", "--mix"} & {*words} else ""
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
        recipe = runpy.run_path(str(ROOT / script))
        recipe["main"].__globals__["fit"] = functools.partial(measure, fault)
        recipe["main"].__globals__["add_reference"] = without_reference
        vars(evaluation)["widened"] = lambda whole, sizes: whole  # the sizes of other processes have no values here
        sys.argv = [script, *words]
        try:
            recipe["main"](parse(recipe["Config"]))
        except SystemExit:
            pass
        except RuntimeError as error:
            print(json.dumps({"error": str(error).splitlines()[0]}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
