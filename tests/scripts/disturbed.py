"""A recipe with random numbers in the data and the forward pass, and with a fault at a chosen step."""

import ctypes
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.stopping.watchdog import Watchdog

FAULTS = ("none", "kill", "kill_all", "kill_launcher", "signal", "hang", "stop", "nan", "evaluation", "vanish")
FAULTS += ("spoil",)  # a signal; the next step has a finite loss with a non-finite gradient
FAULTS += ("stuck_error", "stuck_kill")  # this process ends; the others block without running Python code
FAULTS += ("stuck_slow_error",)  # the others hear of the end seconds before it
FAULTS += ("write", "slow_write")  # faults during the write of a checkpoint


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 1e-2
    log_every: int = 3
    eval_every: int | None = 4
    lr_schedule: str = "cosine"
    check_steps: int = 0  # the check would count among the training steps of a fault
    width: int = flag(33, "width of the hidden layer", minimum=1)
    dropout: float = flag(0.2, "probability of dropout", minimum=0, below=1)
    optimizer: Literal["adamw", "sgd"] = flag("adamw", "kind of optimizer")
    fault: Literal[FAULTS] = flag("none", "kind of fault; it happens once")
    fault_step: int = flag(0, "number of the training step, evaluation pass or (write) checkpoint change, from 0")
    fault_process: int = flag(0, "rank of the process with the fault")
    signal: str = flag("SIGTERM", "name of the signal")


class Noisy(Dataset):
    """36 samples of a sine, with noise from the generators of Python, NumPy and torch."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = random.random() + random.gauss(0, 1) + numpy.random.rand() + float(torch.rand(()))
        x = torch.tensor([index / 36, noise / 100, 1.0, 0.0])
        return {"x": x, "y": torch.sin(6 * x[0])}


class Net(nn.Module):
    """A small network with dropout."""

    _no_split_modules = ["Linear"]

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1) * self.scale


class Fault:
    """The fault of a run. It happens once per output_dir."""

    def __init__(self, config: Config, process: int):
        self.config, self.count = config, 0
        self.marker = Path(config.output_dir) / "fault_was_here"
        self.spoils = False
        self.ends = process == config.fault_process
        self.mine = (self.ends or config.fault.startswith("stuck")) and not self.marker.exists()

    def happens(self) -> bool:
        """Counts its calls. Returns True once, in call `--fault_step` (from 0) in `--fault_process`."""
        self.count += 1
        if not self.mine or self.count != self.config.fault_step + 1:
            return False
        self.marker.touch()
        return True

    def watch_writes(self) -> None:
        """Kills this process at a change to the checkpoints."""

        def hook(event: str, arguments: tuple) -> None:
            writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
            if writes and "checkpoints" in str(arguments[0]) and self.happens():
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    def hold_back_checkpoint(self) -> None:
        """Delays the first checkpoint until the next forward pass, at most 20 s. Writes the number of passes since the
        save into the marker."""
        self.num_passes = 0

        def hook(event: str, arguments: tuple) -> None:
            if event == "os.rename" and Path(arguments[0]).name.startswith("unfinished") and self.happens():
                before, deadline = self.config.save_every, time.monotonic() + 20  # one pass per step
                while self.num_passes <= before and time.monotonic() < deadline:
                    time.sleep(0.01)
                self.marker.write_text(str(self.num_passes - before))

        sys.addaudithook(hook)

    def strike(self) -> float:
        """Causes the fault. Returns a factor for the loss."""
        kind = self.config.fault
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("kill_all", "kill_launcher"):
            launcher = psutil.Process().parent()
            victims = [launcher, *launcher.children()] if kind == "kill_all" else [launcher]
            for victim in victims:
                victim.kill()
            time.sleep(0.3)  # until this process has noted that end; else the run could be done first
        elif kind in ("signal", "evaluation", "spoil"):
            os.kill(os.getpid(), getattr(signal, self.config.signal))
            time.sleep(0.1)  # until the listening thread has noted the signal
            self.spoils = kind == "spoil"
        elif kind.startswith("stuck") and not self.ends:
            time.sleep(0.5)  # the other process ends first
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # never returns, not even for a signal, like a wait for a GPU
        elif kind in ("stuck_error", "stuck_slow_error"):
            told, seconds = Watchdog.stop, 8 if kind == "stuck_slow_error" else 0
            Watchdog.stop = lambda self, failed: (told(self, failed), time.sleep(seconds))
            raise RuntimeError("an error in one process")
        elif kind == "stuck_kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            time.sleep(1000)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "vanish":
            Path(self.config.output_dir).rename(f"{self.config.output_dir}.away")
        return float("nan") if kind == "nan" else 1.0


def main(config: Config) -> None:
    accelerator = start(config)
    model = Net(config.width, config.dropout)
    optimizers = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), config.learning_rate),
        "sgd": lambda: torch.optim.SGD(model.parameters(), config.learning_rate, momentum=0.9),
    }
    fault = Fault(config, accelerator.process_index)
    if config.fault == "write":
        fault.watch_writes()
    elif config.fault == "slow_write":
        fault.hold_back_checkpoint()
    trains = config.fault != "evaluation"

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss = (model(batch["x"]) - batch["y"]) ** 2
        # Not model.training: DeepSpeed's engine sets only that of the modules inside.
        in_training = any(module.training for module in model.modules() if isinstance(module, nn.Dropout))
        if fault.spoils:
            fault.spoils = False
            return {"loss": loss + (loss * 0).sqrt()}
        factor = 1.0
        if config.fault == "slow_write":
            fault.num_passes += 1
        elif config.fault not in ("none", "write") and in_training == trains and fault.happens():
            factor = fault.strike()
        return {"loss": loss * factor}  # also with factor 1: ZeRO needs the same path in all passes

    fit(accelerator, model, optimizers[config.optimizer](), forward_step, Noisy(), Noisy(), config)


if __name__ == "__main__":
    run(main, Config)
