"""Promise: the norm of the gradient is right at every size, and does not depend on how the gradient is divided."""

import math
from pathlib import Path

import pytest
import torch

from accelerate_recipes.common.check.sketch import Sketch
from accelerate_recipes.common.norms import clip, norm_of

SIZES = (1_000_000, 3_000_001, 10_000_000, 30_000_000, 100_000_000)


def drawn(size: int) -> torch.Tensor:
    """Normal numbers; repeated beyond 10 million, to save time."""
    values = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    return values.repeat(max(1, -(-size // len(values))))[:size]


def exact(values: torch.Tensor) -> float:
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in values.split(1_000_000)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_norm_is_right_whole_and_in_parts(size: int, dtype: torch.dtype) -> None:
    values = drawn(size).to(dtype)
    expected = exact(values)
    assert float(norm_of([values])) == pytest.approx(expected, rel=1e-6)
    for parts in (2, 4, 8):
        norms = [norm_of([part]) for part in values.chunk(parts)]
        assert float(torch.linalg.vector_norm(torch.stack(norms))) == pytest.approx(expected, rel=1e-6)


def test_the_norm_that_torch_has_on_the_cpu_is_wrong() -> None:
    """If this fails, torch's own norm may replace that of `common/norms.py`."""
    values = drawn(30_000_000)
    assert abs(float(torch.linalg.vector_norm(values)) / exact(values) - 1) > 1e-4
    assert abs(float(torch._foreach_norm([values])[0]) / exact(values) - 1) > 1e-4


def test_tensors_of_all_sizes_types_and_strides_have_one_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator) for shape in ((), (0,), (1,), (256,), (257,), (3, 1000), (512, 2))
    ]
    tensors += [torch.randn(1000, 3, generator=generator).t(), torch.randn(5, 2000, generator=generator)[:, ::2]]
    tensors += [torch.randn(700, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.complex64)]
    expected = math.sqrt(sum(float(tensor.abs().double().square().sum()) for tensor in tensors))
    assert float(norm_of(tensors)) == pytest.approx(expected, rel=1e-6)
    assert float(norm_of([])) == 0
    assert math.isnan(norm_of([torch.full((10_000,), math.nan)])) and math.isinf(norm_of([torch.tensor(math.inf)]))


def test_gradients_are_clipped_to_the_largest_norm() -> None:
    large, small = drawn(3_000_001), torch.ones(3)
    gradients = [large.clone(), small.clone()]
    clip(gradients, norm_of(gradients), 1.0)
    assert math.hypot(exact(gradients[0]), exact(gradients[1])) == pytest.approx(1, rel=2e-6)
    before = [gradient.clone() for gradient in gradients]
    clip(gradients, norm_of(gradients), 2.0)
    assert all(torch.equal(*pair) for pair in zip(before, gradients))


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 3_000_001, 10_000_000])
@pytest.mark.parametrize("where", ["everywhere", "one element", "one row", "one column"])
def test_a_sketch_has_the_norm_of_a_difference(size: int, where: str) -> None:
    """Of differences that a fault makes, too: in one element, in one row, in each row alike."""
    values = drawn(size)
    other = values.clone()
    step = size if where == "one element" else 1000
    rows = {"everywhere": slice(None), "one row": slice(0, 1000), "one column": slice(None, None, max(1, step))}
    changed = other[:1] if where == "one element" else other[rows[where]]
    changed += 1e-3
    expected = exact(other - values)
    found = (Sketch.of(other) - Sketch.of(values)).norm
    assert found == pytest.approx(expected, rel=1e-6 if size <= 4096 else 0.1)


def test_only_one_place_takes_norms_of_gradients() -> None:
    """torch's functions are off at real sizes, so that no other module may call them for gradients."""
    root = Path(__file__).parents[2] / "common"
    used = ("get_total_norm(", "clip_grads_with_norm_(", "clip_grad_norm_(", "_foreach_norm(")
    found = {path.name for path in root.rglob("*.py") if any(name in path.read_text() for name in used)}
    assert found == {"norms.py"}, found
