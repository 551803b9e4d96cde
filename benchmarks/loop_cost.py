"""The cost of the loop: five loops train the same model with the same batch size and data.

    OMP_NUM_THREADS=1 python benchmarks/loop_cost.py

(a) raw: a PyTorch loop with a DataLoader, as in tutorials; (b) ideal: a PyTorch loop that indexes the data's
tensors, once with AdamW's default kernels and once with its fused kernels; (c) Accelerate: `prepare`,
`accumulate`, `backward`; (d) transformers' Trainer; (e) Lightning Fabric; (f) ours: `fit`, which chooses fused
kernels. All clip gradients and use AdamW. Evaluation and checkpoints are not timed. A round times each loop
once; the order rotates. The ratio to raw is taken within a round, and the table shows its median and range
over the rounds. (d) and (e) need `pip install transformers lightning`. A loop that is not installed is named
and left out.
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data.sets import Batch, ForwardStep
from accelerate_recipes.common.launch.start import start
from accelerate_recipes.common.loop import fit
from accelerate_recipes.common.tasks.nlp.text import TokenDataset
from accelerate_recipes.common.tasks.vision.images import ImageDataset

MAX_NORM = 1.0
LEARNING_RATE = 1e-3


@dataclass
class Task:
    """One task for all loops. Ours uses `dataset` and `forward_step`; the others use `tensors` and `loss`."""

    title: str
    make_model: Callable[[], nn.Module]
    dataset: Dataset
    forward_step: ForwardStep
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch_size: int
    steps_share: int  # divides --steps

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All inputs and labels."""
        return tuple(self.dataset.__getitems__(list(range(len(self.dataset)))).values())


def mlp() -> nn.Module:
    """784-10-10-10, the network of many tutorials."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


def cnn() -> nn.Module:
    """The network of recipes/mnist.py."""
    return recipe("mnist")["ConvNet"]((1, 28, 28), 10)


def transformer() -> nn.Module:
    """The network of recipes/transformer.py, which returns losses."""
    from accelerate_recipes.common.tasks.models.causal_lm import with_losses

    module = recipe("transformer")
    return with_losses(module["build"](module["Config"]())[0])


def recipe(name: str) -> dict:
    import runpy

    return runpy.run_path(str(Path(__file__).parents[1] / "recipes" / f"{name}.py"))


def images(num_samples: int) -> ImageDataset:
    """Random images in the shape of MNIST."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (num_samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return ImageDataset(pixels, torch.randint(0, 10, (num_samples,), generator=generator), num_classes=10)


def text(num_samples: int, context: int) -> TokenDataset:
    """Random bytes."""
    tokens = torch.randint(0, 256, (num_samples * context + 1,), generator=torch.Generator().manual_seed(0))
    return TokenDataset(tokens, context, drop_last=True)


def classify(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The `forward_step` of recipes/mnist.py."""
    logits = model(batch["image"])
    return {
        "loss": F.cross_entropy(logits, batch["label"], reduction="none"),
        "accuracy": (logits.argmax(-1) == batch["label"]).float(),
    }


def classification_loss(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels), labels)


def tasks() -> list[Task]:
    """The tasks to measure."""
    random_images = images(4096)
    return [
        Task("784-10-10-10, batch 32", mlp, random_images, classify, classification_loss, 32, 1),
        Task("CNN, batch 128", cnn, random_images, classify, classification_loss, 128, 10),
        Task(
            "transformer, batch 12 of 64 tokens",
            transformer,
            text(4096, 64),
            lambda model, batch: {"loss": model(batch["tokens"], batch["labels"])},
            lambda model, tokens, labels: model(tokens, labels).mean(),
            12,
            20,
        ),
    ]


class Clock:
    """Times the steps after a warm-up of one step or more.

    Attributes:
        now: gives seconds.
    """

    now: Callable[[], float] = time.perf_counter

    def __init__(self, num_steps: int, warmup: int):
        self.num_steps, self.warmup, self.seen = num_steps, warmup, 0
        self.seconds = 0.0

    def tick(self) -> None:
        """Counts a step. Call it after each step."""
        self.seen += 1
        if self.seen == self.warmup:
            self.started = self.now()
        elif self.seen == self.num_steps:
            self.seconds = (self.now() - self.started) / (self.num_steps - self.warmup)


def train_raw(model: nn.Module, task: Task, clock: Clock) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    loader = DataLoader(TensorDataset(*task.tensors), task.batch_size, shuffle=True, drop_last=True)
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = task.loss(model, inputs, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            clock.tick()
            if clock.seen == clock.num_steps:
                return


def train_ideal(model: nn.Module, task: Task, clock: Clock, fused: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=fused)
    inputs, labels = task.tensors
    parameters = list(model.parameters())
    while True:
        for ids in torch.randperm(len(labels)).split(task.batch_size):
            if len(ids) < task.batch_size:
                continue
            optimizer.zero_grad()
            loss = task.loss(model, inputs[ids], labels[ids])
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            clock.tick()
            if clock.seen == clock.num_steps:
                return


def train_ideal_fused(model: nn.Module, task: Task, clock: Clock) -> None:
    train_ideal(model, task, clock, fused=True)


def train_accelerate(model: nn.Module, task: Task, clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    loader = DataLoader(TensorDataset(*task.tensors), task.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = task.loss(model, inputs, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            clock.tick()
            if clock.seen == clock.num_steps:
                return


def train_trainer(model: nn.Module, task: Task, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": task.loss(self.net, inputs, targets)}

    class Tick(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            clock.tick()

    class Samples(Dataset):
        def __init__(self) -> None:
            self.inputs, self.targets = task.tensors

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"inputs": self.inputs[index], "targets": self.targets[index]}

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder,
            max_steps=clock.num_steps,
            per_device_train_batch_size=task.batch_size,
            dataloader_drop_last=True,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            optim="adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(WithLoss(), arguments, train_dataset=Samples(), callbacks=[Tick()]).train()


def train_fabric(model: nn.Module, task: Task, clock: Clock) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(*task.tensors), task.batch_size, shuffle=True, drop_last=True)
    )
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = task.loss(model, inputs, labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            clock.tick()
            if clock.seen == clock.num_steps:
                return


def train_ours(model: nn.Module, task: Task, clock: Clock) -> None:
    few = Subset(task.dataset, range(1))  # fit needs an evaluation set
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: clock.tick())
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # The evaluation comes after the last step, so it is not timed.
        config = RunConfig(
            batch_size=task.batch_size,
            max_steps=clock.num_steps,
            eval_every=clock.num_steps,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            output_dir=folder,
        )
        fit(start(config), model, optimizer, task.forward_step, task.dataset, few, config)


LOOPS: dict[str, tuple[Callable[..., None], str | None]] = {
    "raw PyTorch": (train_raw, None),
    "ideal": (train_ideal, None),
    "ideal, fused": (train_ideal_fused, None),
    "Accelerate": (train_accelerate, None),
    "transformers.Trainer": (train_trainer, "transformers"),
    "Lightning Fabric": (train_fabric, "lightning"),
    "ours": (train_ours, None),
}


def measure(task: Task, num_steps: int, rounds: int, chosen: list[str]) -> None:
    wanted = {name: LOOPS[name] for name in dict.fromkeys(["raw PyTorch", *chosen])}
    loops = {name: loop for name, (loop, package) in wanted.items() if package is None or find_spec(package)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(rounds):
        names = list(loops)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            torch.manual_seed(0)
            clock = Clock(num_steps, warmup=max(1, num_steps // 5))
            loops[name](task.make_model(), task, clock)
            seconds[name].append(clock.seconds)
    print("| loop | µs per step, median (min to max) | ratio to raw, median (min to max) |")
    print("| --- | ---: | ---: |")
    for name, times in seconds.items():
        ratios = [mine / raw for mine, raw in zip(times, seconds["raw PyTorch"])]
        micro = [1e6 * value for value in times]
        print(
            f"| {name} | {statistics.median(micro):.0f} ({min(micro):.0f} to {max(micro):.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    for name in wanted.keys() - loops.keys():
        print(f"{name}: not installed, left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps per loop and round; a fifth is warm-up")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--tasks", nargs="+", type=int, choices=(0, 1, 2), default=(0, 1, 2))
    parser.add_argument(
        "--cpu_seconds", action="store_true", help="of the process, where other work shares the machine"
    )
    arguments = parser.parse_args()
    if arguments.cpu_seconds:
        Clock.now = staticmethod(time.process_time)
    packages = [p for p in ("torch", "accelerate", "transformers", "lightning") if find_spec(p)]
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s), "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    )
    for task in [task for index, task in enumerate(tasks()) if index in arguments.tasks]:
        num_steps = arguments.steps // task.steps_share
        print(f"\n{task.title}, {arguments.rounds} rounds of {num_steps} steps\n")
        measure(task, num_steps, arguments.rounds, arguments.loops)


if __name__ == "__main__":
    main()
