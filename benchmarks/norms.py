"""The relative error and the time of the norm of float32 and bf16 tensors: torch's, and that of `common/norms.py`.

    python benchmarks/norms.py

Exact is float64. "in 8 parts" is the norm of the norms of 8 shards.
"""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

from accelerate_recipes.common.norms import norm_of

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)
ROUNDS = 7


def exact(values: Tensor) -> float:
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in values.split(1_000_000)))


def seconds(functions: list[Callable[[], object]]) -> list[float]:
    """The fastest call of each; they take turns."""
    fastest = [math.inf] * len(functions)
    for _ in range(ROUNDS):
        for number, function in enumerate(functions):
            started = time.perf_counter()
            function()
            fastest[number] = min(fastest[number], time.perf_counter() - started)
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=SIZES)
    sizes = parser.parse_args().elements
    print(f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores, torch {torch.__version__}")
    print("| type | elements | error of torch | ours | ours, in 8 parts | torch, ms | ours, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for dtype in (torch.float32, torch.bfloat16):
        for size in sizes:
            values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
            expected = exact(values)
            parts = torch.stack([norm_of([part]) for part in values.chunk(8)])
            norms = (torch._foreach_norm([values])[0], norm_of([values]), norm_of([parts]))
            errors = [f"{float(norm) / expected - 1:.0e}" for norm in norms]
            times = seconds([lambda: torch._foreach_norm([values]), lambda: norm_of([values])])  # noqa: B023
            kind = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {size:,} | {' | '.join(errors)} | {' | '.join(f'{1e3 * one:.2f}' for one in times)} |")


if __name__ == "__main__":
    main()
