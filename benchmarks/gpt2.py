"""GPT-2 124M on one GPU: tokens per second, MFU and peak memory of our loop beside a loop written by hand.

    python benchmarks/gpt2.py
    python benchmarks/gpt2.py --attention cudnn --residual bf16 --batch_size 64 --loss_chunk 16384

The shape is that of GPT-2 124M: 12 layers, 12 heads, width 768, context 1,024, vocabulary 50,304. Both
loops train the same model on the same random tokens, with bf16, torch.compile, fused AdamW and gradient
clipping. They take turns in one process, and the ratio is taken within a round. Only training steps are
timed. The last output is the profiler's table of one of our steps. A switch changes both loops, so that the
ratio stays fair. gpt2_variants.py tries several combinations.

- `--attention` allows one backend of torch's attention. Where it cannot run, torch raises an error: no other
  backend takes its place silently. sdpa: torch chooses. flash3 needs the package flash_attn_interface.
- `--residual bf16` rounds the sum of the embeddings to bf16. The residual stream then stays in bf16 through
  all blocks; LayerNorm computes in float32, and the weights stay in float32. Without it, the embeddings'
  float32 makes every sum with a bf16 output float32. The losses of a real training were not compared.
- `--loss_chunk N` holds the logits of N tokens at a time; the backward pass computes them again.
- `--inductor` is a mode of torch.compile; none compiles nothing. Those with CUDA graphs are reduce-overhead and
  max-autotune.

Needs a GPU. Without one, `--layers 1 --heads 2 --width 64 --context 32 --vocabulary 256 --batch_size 4` only shows
that the script runs. docs/speed.md has the figures of an H200.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpt2_loops import DEVICE, Clock, build, profile_of_ours, train_ours, train_raw
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.records.run_card import peak_flops
from accelerate_recipes.common.tasks.models.causal_lm import flops_per_sample
from accelerate_recipes.common.tasks.nlp.text import TokenDataset

SIZES = {
    "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50304,
    "batch_size": 32, "loss_chunk": 0, "steps": 60, "rounds": 4,
}  # fmt: skip
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # after torch has exchanged the kernels of this backend
}
MODES = ("none", "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")


@contextlib.contextmanager
def chosen_kernels(arguments: argparse.Namespace) -> Iterator[None]:
    """Sets the attention's backend and inductor's options for both loops: torch reads them while it compiles."""
    with contextlib.ExitStack() as entered:
        # The key of this cache ignores the backend (torch 2.13): another backend's code would run.
        entered.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        if arguments.attention == "flash3":
            nn.attention.activate_flash_attention_impl("FA3")
        if arguments.attention != "sdpa":
            entered.enter_context(sdpa_kernel(BACKENDS[arguments.attention]))
        if arguments.inductor != "none":
            options = torch._inductor.list_mode_options(arguments.inductor)
            entered.enter_context(torch._inductor.config.patch(options))
        yield


def parse() -> argparse.Namespace:
    """Reads the command line. Raises UsageError for what this machine cannot do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", choices=("sdpa", *BACKENDS), default="sdpa")
    parser.add_argument("--residual", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--inductor", choices=MODES, default="default")
    parser.add_argument("--json", type=Path, help="file for the figures; leaves out the profile")
    arguments = parser.parse_args()
    if DEVICE == "cpu":
        for name, needing in (("attention", ("cudnn", "flash3")), ("inductor", MODES[3:])):
            if getattr(arguments, name) in needing:
                raise UsageError(f"--{name} {getattr(arguments, name)} needs a GPU: leave it out")
        if arguments.width >= SIZES["width"]:
            raise UsageError(f"--width {arguments.width} needs a GPU: use the sizes at the end of --help")
    if arguments.attention == "flash3" and find_spec("flash_attn_interface") is None:
        raise UsageError("--attention flash3 needs FlashAttention 3: install flash_attn_interface, or type flash")
    return arguments


def measure(arguments: argparse.Namespace, dataset: TokenDataset) -> dict[str, dict[str, Any]]:
    """{loop: figures}, from loops that take turns."""
    loops: dict[str, Callable[..., None]] = {"by hand": train_raw, "ours": train_ours}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    memory = dict.fromkeys(loops, 0.0)
    for index in range(arguments.rounds):
        for name in list(loops)[:: 1 if index % 2 == 0 else -1]:
            gc.collect()  # the models of earlier rounds
            torch._dynamo.reset()  # otherwise their compiled code counts against the limit of recompilations
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            clock = Clock(arguments.steps, warmup=arguments.steps // 3)
            loops[name](arguments, dataset, clock)
            seconds[name].append(clock.seconds)
            if DEVICE == "cuda":
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if DEVICE == "cuda" else None
    flops = flops_per_sample(build(arguments), arguments.context) * arguments.batch_size
    figures = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        figures[name] = {
            "tokens_per_second": arguments.batch_size * arguments.context / median,
            "mfu": flops / median / peak if peak else None,
            "peak_gib": memory[name],
            "ratios": [raw / mine for mine, raw in zip(times, seconds["by hand"])],
        }
    return figures


def main() -> None:
    arguments = parse()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # beyond it, a loop silently runs uncompiled code
    dataset = TokenDataset(
        torch.randint(0, arguments.vocabulary, (arguments.batch_size * 8 * arguments.context + 1,)),
        arguments.context,
        drop_last=True,
    )
    with chosen_kernels(arguments):
        figures = measure(arguments, dataset)
        gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
        print(f"{gpu}, torch {version('torch')}, accelerate {version('accelerate')}, batch {arguments.batch_size}")
        print("| loop | tokens per second, median | MFU | peak GiB | ratio to by hand, median (min to max) |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, row in figures.items():
            mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
            ratios = row["ratios"]
            print(
                f"| {name} | {row['tokens_per_second']:,.0f} | {mfu} | {row['peak_gib']:.2f} "
                f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
            )
        if arguments.json is None:
            print(profile_of_ours(arguments, dataset))
        else:
            arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
