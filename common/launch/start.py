"""start(config) joins the processes of a run, or refuses a config that cannot run here."""

import ctypes
import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # before a process group exists: else its default arguments keep the group forever
from accelerate import Accelerator, utils

from ..config import RunConfig
from ..cpu_group import collective_timeout
from ..environment import Environment, drop_leftovers, print_once, share_cores, why_no_gpu
from ..errors import UsageError
from ..layout import Layout
from ..package import is_own
from ..parallel.strategies import STRATEGIES, layout_of, main_strategy
from ..plan import split_batch
from .checks import launch_checks
from .machines import agreement, saying_who_waits

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
TYPES_OF_ACCELERATE = {strategy.distributed_type for strategy in STRATEGIES}


class ObservedAccelerator(Accelerator):
    """An Accelerator that records in `asked` where the recipe's code asks how many processes there are, or gathers
    values itself: {what it asks for: the file and line of the first time}."""

    def __init__(self, layout: Layout, **named: Any):
        self.layout, self.asked = layout, dict[str, str]()
        super().__init__(**named)

    def note(self, what: str) -> None:
        """Records the caller's caller, if that is the recipe's code."""
        frame = sys._getframe(2)
        if what not in self.asked and is_own(frame.f_code.co_filename):
            self.asked[what] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    @property
    def device(self) -> torch.device:
        """This process's device. Not Accelerate's cpu:0: torch would copy tensors from the CPU to it."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


def _observed(name: str) -> Any:
    """A property or method of Accelerate's own that notes who asks for it."""
    own: Any = getattr(Accelerator, name)

    def asked(self: ObservedAccelerator, *args: Any, **named: Any) -> Any:
        self.note(name)
        found = own.__get__(self)
        return found if isinstance(own, property) else found(*args, **named)

    return property(asked) if isinstance(own, property) else asked


for _name in ("num_processes", "process_index", "is_main_process", "gather", "gather_for_metrics", "reduce"):
    setattr(ObservedAccelerator, _name, _observed(_name))


def start(config: RunConfig) -> ObservedAccelerator:
    """Joins the other processes, and prints in one line what runs where.

    Without a GPU the same config files run as a rehearsal: gloo processes on the CPU replace the GPUs. Raises
    UsageError if this machine or Accelerate cannot run the config."""
    for name in ("torch.distributed", "DeepSpeed"):  # messages and warnings that a user cannot act on
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(accelerate|deepspeed|torch)\.")
    drop_leftovers()
    environment = Environment.read()
    with saying_who_waits(environment):
        return _join(environment, config)


def _join(environment: Environment, config: RunConfig) -> ObservedAccelerator:
    with agreement(environment, config):
        layout = layout_of(environment, config)
        for check in launch_checks(layout):
            check(layout, config)
        trackers = _trackers(config)
    share_cores()
    if environment.gradient_accumulation == "auto":  # DeepSpeed's word, which Accelerate refuses
        os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    if config.deterministic:  # https://docs.pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
        torch.backends.cudnn.benchmark = False
    rehearses, timeout = layout.device == "cpu", collective_timeout(config.hang_timeout)
    if rehearses_fp16 := rehearses and layout.precision == "fp16":
        layout = replace(layout, precision="float32")
        print_once("fp16 needs a GPU: this rehearsal runs in float32")
    if environment.store_number > 0 and layout.num_processes > 1:
        _join_after_restart(layout, timeout)
    if rehearses:
        prepare_rehearsal(layout, timeout)
    try:
        with mesh_of_accelerate(layout):
            accelerator = ObservedAccelerator(
                layout,
                mixed_precision="no" if rehearses_fp16 else None,  # None: as the config file says
                log_with=trackers,
                project_config=utils.ProjectConfiguration(logging_dir=f"{config.output_dir}/tensorboard"),
                kwargs_handlers=[
                    utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                    utils.InitProcessGroupKwargs(timeout=timeout),
                ],
            )
    except (ValueError, ImportError, NotImplementedError) as error:
        mpi = "; without MPI, unset its variables, such as PMI_SIZE" if "MASTER_ADDR" in str(error) else ""
        raise UsageError(f"Accelerate refuses this config: {str(error).splitlines()[0]}{mpi}") from None
    _check_applied(accelerator, layout)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32 or layout.precision != "float32"  # torch's default is on
    # The fast kernels of nn.TransformerEncoder set padding to 0, only in evaluation and only where the masks of a
    # micro-batch allow it; they bypass the layers that gather weights (ZeRO-3), and do not take divided weights.
    torch.backends.mha.set_fastpath_enabled(False)
    main_strategy(layout).after_start()
    utils.set_seed(config.seed)  # the same in every process, so that each builds the same model
    accelerator.print(_banner(layout, config, rehearses) + "\n", end="")  # one write: another process may write too
    return accelerator


def mesh_of_accelerate(layout: Layout) -> AbstractContextManager[None]:
    """Hides meshes of the config file from Accelerate in the `with` block, and FSDP2 that joins another strategy."""
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "false"}
    if main_strategy(layout).distributed_type is not utils.DistributedType.FSDP:
        variables["ACCELERATE_USE_FSDP"] = "false"
    return utils.patch_environment(**variables)


def _join_after_restart(layout: Layout, timeout: timedelta) -> None:
    """Joins the others under a new prefix in the launcher's store, which still has the addresses of ended processes."""
    backend = torch.distributed.get_default_backend_for_device(layout.device)
    if layout.environment.is_true("fsdp_offload_params"):  # as Accelerate does: weights on the CPU need collectives
        backend = f"{layout.device}:{backend},cpu:gloo"
    store, rank, size = next(torch.distributed.rendezvous("env://"))
    store = torch.distributed.PrefixStore(f"restart_{layout.environment.store_number}", store)
    torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def _trackers(config: RunConfig) -> list[str]:
    known = [name for name in utils.LoggerType.list() if name != "all"]
    names = [name.strip() for name in config.report_to.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"--report_to {name}: no such tracker; use one of {', '.join(sorted(known))}")
        if find_spec(name) is None:  # Accelerate would silently leave it out
            raise UsageError(f"--report_to {name} needs {name}: run pip install {name.replace('_', '-')}")
    return names


def prepare_rehearsal(layout: Layout, timeout: timedelta) -> None:
    """Makes the config of a GPU run work on the CPU."""
    # glibc returns freed memory, and the next step gets it again page by page: 15 % of the check at 134 M weights.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)  # large blocks, too, come from the heap, where they can be used again
        mallopt(M_TRIM_THRESHOLD, 1 << 30)  # bytes
    # If deepspeed is installed, Accelerate imports it under all configs, and the import warns about a missing GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main_strategy(layout).rehearse(layout, timeout)


def _check_applied(accelerator: Accelerator, layout: Layout) -> None:
    """Raises UsageError if Accelerate does not run what the config asks for."""
    got = accelerator.distributed_type
    expected = {
        "number of processes": (layout.num_processes, accelerator.num_processes),
        "sharding by": (main_strategy(layout).distributed_type, got if got in TYPES_OF_ACCELERATE else None),
        "precision": (layout.precision, accelerator.mixed_precision.replace("no", "float32")),
        "gradient accumulation": (1, accelerator.gradient_accumulation_steps),
    }
    for what, (asked, got) in expected.items():
        if asked != got:
            raise UsageError(f"the config asks for {what} {asked}, but Accelerate runs {got}: see accelerate_configs/")


def _banner(layout: Layout, config: RunConfig, rehearses: bool) -> str:
    num_processes, (micro_batch_size, accumulation) = layout.num_processes, split_batch(config, layout)
    num_machines = layout.environment.num_machines
    factors = f"{layout.data_parallel_size} × {micro_batch_size}{f' × {accumulation} accumulated' * (accumulation > 1)}"
    line = (
        f"{num_processes} process{'es' * (num_processes > 1)} on {num_machines} machine{'s' * (num_machines > 1)}, "
        f"{layout}, {layout.precision}, batch {config.batch_size} = {factors}"
    )
    if not rehearses and layout.precision == "float32":
        line += " with TF32" if config.tf32 else " without TF32 (--tf32 or --mixed_precision bf16 is faster)"
    if rehearses and (reason := why_no_gpu()):
        line += f" (on the CPU, because torch cannot use this machine's GPU: {reason})"
    elif rehearses and num_processes > 1:
        line += f" (no GPU found: {num_processes} CPU processes)"
    elif rehearses:
        line += " (on the CPU)"
    elif (idle := torch.accelerator.device_count() - num_processes // num_machines) > 0:
        line += f" ({idle} GPUs idle: --num_processes {torch.accelerator.device_count() * num_machines} uses all)"
    return line
