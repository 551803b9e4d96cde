"""The hardware of a machine, and the peak rate of its GPUs."""

import os
import platform
from typing import Any

import torch

from ..environment import device_type, has_gpu

# Dense bf16 and fp16 floating-point operations per second, from NVIDIA's data sheets. For H100,
# H200, L4 and L40S they list twice as much, with sparsity. The more specific name comes first.
PEAK_FLOPS = {
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs of this machine, for the run card."""
    module: Any = torch.get_device_module(device_type())
    gpus = [module.get_device_name(index) for index in range(torch.accelerator.device_count())] if has_gpu() else []
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpus": gpus}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak floating-point operations per second of a GPU in bf16 or fp16; None if unknown, as for a slice of a GPU."""
    words = device_name.replace("-", " ").split()
    if precision not in ("bf16", "fp16") or "MIG" in words:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if set(name.split()) <= set(words)), None)
