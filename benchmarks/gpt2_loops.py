"""The two loops of gpt2.py: one written by hand, and ours. Both train the model of `build`."""

import argparse
import contextlib
import io
import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.launch.start import start
from accelerate_recipes.common.loop import fit
from accelerate_recipes.common.tasks.models.causal_lm import flops_per_sample, with_losses
from accelerate_recipes.common.tasks.nlp.text import TokenDataset

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
    model = with_losses(GPT2LMHeadModel(shape), chunk=arguments.loss_chunk, longest=arguments.context)
    if arguments.residual == "bf16":
        # `drop` gets the sum of the embeddings, and its output is the start of the residual stream.
        model.transformer.drop.register_forward_hook(lambda module, inputs, output: output.to(torch.bfloat16))
    return model


def train_raw(arguments: argparse.Namespace, dataset: TokenDataset, clock: Clock) -> None:
    """The loop written by hand, in PyTorch alone."""
    model = build(arguments).to(DEVICE)
    if arguments.inductor != "none":
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


def train_ours(arguments: argparse.Namespace, dataset: TokenDataset, clock: Clock) -> None:
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
            compile=arguments.inductor != "none",
            output_dir=folder,
        )
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as accelerate launch --mixed_precision bf16 does
        few = Subset(dataset, range(1))  # fit needs an evaluation set
        fit(
            start(config),
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
