"""The L2 norm of tensors of any size, and clipping to it."""

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

SMALL = 16_384  # elements that float64 adds up one by one: beyond, rows are faster
ROW = 256
PIECE = 32_768  # low-precision elements that are converted at a time: few enough for the cache and for one thread
LOW_PRECISION = (torch.bfloat16, torch.float16)


def norm_of(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all elements of plain or sparse tensors on one device: 0-dim, float32. Relative error: below 1e-6.

    On the CPU, torch adds up the squares of a float32 tensor in a few sums, and loses squares beside a large sum: the
    norm is off by 1e-5 at a million elements and by 1e-3 at 30 million (docs/speed.md). Here float64 adds up small
    tensors, and the norms of rows of 256 elements of large ones. On a GPU torch adds in trees: each thread block adds
    65,536 elements, and another kernel their results (aten/src/ATen/native/cuda/ForeachReduceOp.cu).
    """
    if not tensors:
        return torch.zeros(())
    tensors = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    if tensors[0].device.type != "cpu":
        is_low = any(tensor.dtype in LOW_PRECISION for tensor in tensors)  # the norm would have 8 bits, too
        each = torch._foreach_norm(tensors, 2, torch.float32) if is_low else torch._foreach_norm(tensors)
        return torch.linalg.vector_norm(torch.stack(each))
    norms: list[Tensor] = []  # of rows, float32
    small: list[Tensor] = []
    for tensor in tensors:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.numel() <= SMALL:
            small.append(tensor)
            continue
        values, rest = tensor.reshape(-1), tensor.numel() % ROW
        if rest:
            small.append(values[-rest:])
            values = values[:-rest]
        pieces = (part.float() for part in values.split(PIECE)) if tensor.dtype in LOW_PRECISION else (values,)
        norms += [torch.linalg.vector_norm(piece.view(-1, ROW), dim=1) for piece in pieces]
    if small:  # one operation for all: a small model has a step of 0.5 ms
        norms.append(torch.linalg.vector_norm(_flatten_dense_tensors(small), dtype=torch.float64).view(1))
    return torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0], dtype=torch.float64).float()


def relative_distance(value: Tensor, expected: Tensor) -> float:
    """‖value − expected‖ / ‖expected‖ of two tensors of one shape and any type, computed in 64 bits."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    value, expected = value.to(wide), expected.to(wide)
    return float((value - expected).norm() / expected.norm().clamp(min=1e-30))


def clip(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales gradients with a norm above `max_norm` to that norm, by the factor of torch's `clip_grad_norm_`."""
    gradients = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    if not gradients:  # of a stage that is frozen
        return
    if norm.device.type != "cpu":  # to read the norm would stall a GPU
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    elif not (factor := max_norm / (float(norm) + 1e-6)) >= 1:  # also if it is not a number
        torch._foreach_mul_(gradients, factor)
