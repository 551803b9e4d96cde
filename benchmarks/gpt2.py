"""GPT-2 124M on one GPU: tokens per second, MFU and peak memory of our loop beside a loop written by hand.

    python benchmarks/gpt2.py

The shape is that of GPT-2 124M: 12 layers, 12 heads, width 768, context 1,024, vocabulary 50,304. Both
loops train the same model on the same random tokens, with bf16, torch.compile, fused AdamW and gradient
clipping. They take turns in one process, and the ratio is taken within a round. Only training steps are
timed. The last output is the profiler's table of one of our steps.

Needs a GPU. Without one, `--layers 1 --heads 2 --width 64 --context 32 --vocabulary 256 --batch_size 4` only shows
that the script runs. NOT YET RUN ON A GPU.
"""

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import GPT2Config, GPT2LMHeadModel

from common.config import RunConfig
from common.data.text import TokenDataset
from common.loop import fit
from common.models.causal_lm import flops_per_sample, with_losses
from common.records.hardware import peak_flops

LEARNING_RATE, MAX_NORM = 6e-4, 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """Times the steps after a warm-up. Waits for the GPU only before the first and after the last timed step."""

    def __init__(self, num_steps: int, warmup: int):
        self.num_steps, self.warmup, self.seen, self.seconds = num_steps, warmup, 0, 0.0

    def tick(self) -> None:
        """Counts a step. Call it after each step."""
        self.seen += 1
        if self.seen in (self.warmup, self.num_steps):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.seen == self.warmup:
                self.started = now
            else:
                self.seconds = (now - self.started) / (self.num_steps - self.warmup)


def build(arguments: argparse.Namespace) -> nn.Module:
    """GPT-2 without dropout that returns losses. Each call returns the same weights."""
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=arguments.vocabulary,
        n_positions=arguments.context,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return with_losses(GPT2LMHeadModel(shape))


def train_raw(arguments: argparse.Namespace, dataset: TokenDataset, clock: Clock) -> None:
    """The loop written by hand, in PyTorch alone."""
    model = build(arguments).to(DEVICE)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    settings = {"shuffle": True, "drop_last": True, "pin_memory": DEVICE == "cuda"}
    # The dataset's __getitems__ returns whole batches.
    loader = DataLoader(dataset, arguments.batch_size, collate_fn=lambda batch: batch, **settings)
    while True:
        for batch in loader:
            tokens, labels = (batch[name].to(DEVICE, non_blocking=True) for name in ("tokens", "labels"))
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(tokens, labels).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.seen == clock.num_steps:
                return


def train_ours(arguments: argparse.Namespace, dataset: TokenDataset, clock: Clock, profile: bool = False) -> None:
    """Our loop: `fit`, with the records of a recipe."""

    class Ticking(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:
            super().step(closure)
            clock.tick()

    model = build(arguments)
    optimizer = Ticking(model.parameters(), LEARNING_RATE, fused=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = RunConfig(
            batch_size=arguments.batch_size,
            max_steps=clock.num_steps,
            eval_every=clock.num_steps,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            compile=True,
            profile=profile,
            output_dir=folder,
        )
        accelerator = Accelerator(mixed_precision="bf16", cpu=DEVICE == "cpu")
        few = Subset(dataset, range(1))  # fit needs an evaluation set
        fit(
            accelerator,
            model,
            optimizer,
            lambda model, batch: {"loss": model(batch["tokens"], batch["labels"])},
            dataset,
            few,
            config,
            tokens_per_sample=arguments.context,
            flops_per_sample=flops_per_sample(model, arguments.context),
        )


def profile_of_ours(arguments: argparse.Namespace, dataset: TokenDataset) -> str:
    """torch's table of the time that each operation takes, in the last step of a short run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=8, warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        clock = Clock(10, warmup=1)
        tick = clock.tick
        clock.tick = lambda: (tick(), profiler.step())
        train_ours(arguments, dataset, clock)
    key = "self_cuda_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50304,
        "batch_size": 32, "steps": 60, "rounds": 4,
    }  # fmt: skip
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # beyond it, a loop silently runs uncompiled code
    dataset = TokenDataset(
        torch.randint(0, arguments.vocabulary, (arguments.batch_size * 8 * arguments.context + 1,)),
        arguments.context,
        drop_last=True,
    )
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
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    print(f"{gpu}, torch {version('torch')}, accelerate {version('accelerate')}, batch {arguments.batch_size}")
    print("| loop | tokens per second, median | MFU | peak GiB | ratio to by hand, median (min to max) |")
    print("| --- | ---: | ---: | ---: | ---: |")
    peak = peak_flops(gpu, "bf16")
    flops = flops_per_sample(build(arguments), arguments.context) * arguments.batch_size
    for name, times in seconds.items():
        median = statistics.median(times)
        ratios = [raw / mine for mine, raw in zip(times, seconds["by hand"])]
        mfu = f"{flops / median / peak:.1%}" if peak else "unknown"
        print(
            f"| {name} | {arguments.batch_size * arguments.context / median:,.0f} | {mfu} | {memory[name]:.2f} "
            f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    print(profile_of_ours(arguments, dataset))


if __name__ == "__main__":
    main()
