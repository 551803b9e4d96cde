"""Promise: what a CPU cannot run, but can look at: precisions, errors and peak rates of GPUs."""

from typing import Any

import pytest
import torch

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data.batches import _send
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel.fsdp2 import mixed_precision_policy
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.records.run_card import peak_flops
from accelerate_recipes.common.stopping.watch import advice_for


@pytest.mark.parametrize(("precision", "gathered"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_fsdp2_gathers_in_16_bits_and_sums_gradients_in_float32(precision: str, gathered: torch.dtype) -> None:
    policy = mixed_precision_policy(precision)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (gathered, torch.float32, None)
    assert mixed_precision_policy("float32").param_dtype is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "NCCL error: ... ncclUnhandledCudaError ... Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_memory_that_runs_out_beside_the_allocator_of_torch(text: str) -> None:
    plan = Plan.of(RunConfig(batch_size=8), Layout(), 100)
    assert advice_for(RuntimeError(text), plan).startswith("out of memory with 8 samples per forward pass: use --micro")
    assert advice_for(RuntimeError("CUDA error: an illegal memory access"), plan) is None


def test_a_slice_of_a_gpu_has_no_known_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") is None


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_sent_to_a_gpu_has_no_gaps(monkeypatch: pytest.MonkeyPatch, channels_last: bool) -> None:
    """Gaps, as in a part of a row, make the copy wait; a memory format without gaps stays."""
    made, sent = torch.empty_like, []

    def empty_like(tensor: torch.Tensor, pin_memory: bool) -> torch.Tensor:
        assert pin_memory  # a machine without a GPU has no pinned memory
        sent.append(made(tensor))
        return sent[-1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    whole: Any = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    tensor = whole.contiguous(memory_format=torch.channels_last) if channels_last else whole[..., :-1]
    assert _send(tensor, torch.device("meta")).shape == tensor.shape
    assert torch.equal(sent[0], tensor)
    assert sent[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
