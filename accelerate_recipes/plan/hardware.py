"""The hardware that a plan is for: rates of a GPU and of its links."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.paths import check_number, text_of

TABLE = Path(__file__).parent / "hardware.json"


@dataclass(frozen=True)
class Gpu:
    """A GPU: its rates, and the share of them that programs reach."""

    name: str
    flops_16: float  # operations per second in bf16 or fp16; a peak, as the rates below
    flops_tf32: float
    flops_32: float
    memory_gb: float  # 10^9 bytes of memory
    memory_rate: float  # bytes per second
    link: float  # bytes per second that it sends to others of its machine
    network: float  # to other machines
    flops: float  # share of the peak that programs reach
    memory: float  # the same for memory_rate, and below for the links
    reached_link: float
    reached_network: float
    launch: float  # seconds of each operation
    link_latency: float  # seconds of each part of a collective
    network_latency: float
    reserved_gb: float  # 10^9 bytes of memory that tensors cannot use: the CUDA context, NCCL, gaps

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    def peak(self, is_16: bool, tf32: bool) -> float:
        """Peak operations per second."""
        return self.flops_16 if is_16 else self.flops_tf32 if tf32 else self.flops_32

    def seconds(self, flops: float, moved: int, is_16: bool, tf32: bool) -> float:
        """Time of an operation that moves these bytes: the roofline (Williams et al. 2009), and at least the time to
        start it. `is_16`: whether it computes in bf16 or fp16; `tf32`: whether float32 products use TF32."""
        return max(flops / (self.peak(is_16, tf32) * self.flops), moved / (self.memory_rate * self.memory), self.launch)


def read(name: str, memory_gb: float | None = None, table: Path | None = None) -> Gpu:
    """Reads a GPU's rates. Raises UsageError for an unknown GPU, a missing file, or too little memory. `memory_gb`: if
    it differs from the table's; `table`: a JSON file in the form of hardware.json; None: that file."""
    try:
        content: dict[str, Any] = json.loads(text_of(table or TABLE, "--hardware", f"copy {TABLE}"))
        gpus, reached = content["gpus"], content["reached"]
        if (row := gpus.get(name.lower().replace(" ", ""))) is None:
            raise UsageError(f"--gpu {name}: use one of {', '.join(gpus)}, or --hardware with your own JSON file")
        rates = {key: value for key, value in row.items() if key != "source"}
        shares = {key: value for key, value in reached.items() if key != "about"}
        shares |= {f"reached_{key}": shares.pop(key) for key in ("link", "network")}
        gpu = Gpu(name=name, **rates, **shares)
        for key, value in (rates | shares).items():
            check_number(float(value), f"--hardware {table}: {key}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"--hardware {table} is not in the form of {TABLE}: copy that file and change it") from None
    check_number(memory_gb, "--memory", gpu.reserved_gb, ", the GB of a GPU that tensors cannot use")
    return gpu if memory_gb is None else replace(gpu, memory_gb=memory_gb)
