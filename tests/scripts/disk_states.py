"""Resumes from each state that a kill or a power loss can leave on the disk.

disk_states.py NUM_STATES SEED

Three runs write into one folder: A, then B with --overwrite_output_dir, then B again with more steps. Before each
operation on a file, what is in the folder is noted, and what of it was flushed. So the disk after a kill, or after a
power loss at that moment, can be made again:

- kill: everything is there;
- strict: what was not flushed is lost, contents and names;
- names: the names are there, contents that were not flushed are lost (file systems that keep the order of names).

From NUM_STATES of these states, drawn at random (0: all), a run resumes. Prints each untrue outcome, and the number of
states. Following ALICE (Pillai et al. 2014) and CrashMonkey (Mohan et al. 2018).
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, start
from accelerate_recipes.common.checkpoint import save
from accelerate_recipes.common.checkpoint.identity import identity
from accelerate_recipes.common.checkpoint.resume import find_checkpoint
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.errors import RunError
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.records.output_dir import OutputDir
from accelerate_recipes.common.step.setup import Setup

Tree = dict[str, bytes | None]  # {path in the folder: content; None for a folder}
EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


class Disk:
    """Notes the states of a folder, and what was flushed."""

    def __init__(self, root: Path):
        self.root, self.is_on, self.lock = root, False, RLock()  # a thread removes old checkpoints
        self.moments: list[tuple[str, int, dict[str, Tree]]] = []  # (run, newest step whose save ended, {loss: tree})
        self.contents: dict[int, bytes] = {}  # {inode: what was flushed of it}
        self.names: dict[int, dict[str, int]] = {}  # {inode of a folder: {name: inode}, as flushed}
        self.label, self.saved, self.num_removed = "", 0, 0
        sys.addaudithook(self._event)
        self._fsync, os.fsync = os.fsync, self._flush  # type: ignore[assignment]

    def note(self) -> None:
        """Notes the state of this moment."""
        trees: dict[str, Tree] = {"kill": {}, "names": {}, "strict": {}}
        inodes: dict[int, Path] = {}
        for path in self._paths():
            try:
                inode, content = path.stat().st_ino, None if path.is_dir() else path.read_bytes()
            except FileNotFoundError:
                continue
            inodes[inode] = path
            name = str(path.relative_to(self.root))
            trees["kill"][name] = content
            trees["names"][name] = None if content is None else self.contents.get(inode, b"")
        self._durable(self.root.stat().st_ino, "", trees["strict"])
        self.moments.append((self.label, self.saved, trees))

    def sync(self) -> None:
        """Notes that all in the folder is flushed, as it is some time after a run."""
        for path in [self.root, *self._paths()]:
            if path.is_dir():
                self.names[path.stat().st_ino] = {other.name: other.stat().st_ino for other in path.iterdir()}
            else:
                self.contents[path.stat().st_ino] = path.read_bytes()

    def _paths(self) -> list[Path]:
        while True:
            with suppress(FileNotFoundError):  # the thread removes a folder in this moment
                return sorted(self.root.rglob("*"))

    def _durable(self, folder: int, prefix: str, tree: Tree) -> None:
        for name, inode in self.names.get(folder, {}).items():
            tree[prefix + name] = None if inode in self.names else self.contents.get(inode, b"")
            if inode in self.names:
                self._durable(inode, f"{prefix}{name}/", tree)

    def _event(self, event: str, arguments: tuple) -> None:
        with self.lock:
            self._note_event(event, arguments)

    def _note_event(self, event: str, arguments: tuple) -> None:
        if not self.is_on or not arguments or not isinstance(arguments[0], str | Path):
            return
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not writes and event not in EVENTS:
            return
        self.is_on = False
        path = Path(arguments[0])
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # relative to an open folder
            path = Path(f"/proc/self/fd/{arguments[1]}").readlink() / path
        if path.is_relative_to(self.root):
            self.note()
            if event in ("os.remove", "os.rmdir"):
                with suppress(FileNotFoundError):  # it removes what may not be there
                    self._forget(path.lstat().st_ino)
            elif event == "os.rename" and Path(arguments[1]).is_file():  # what has the new name until now goes
                self._forget(Path(arguments[1]).stat().st_ino)
        self.is_on = True

    def _forget(self, inode: int) -> None:
        """The system may give the number of a removed file to a new one: what was flushed of it gets another."""
        self.num_removed += 1
        for names in self.names.values():
            names.update({name: -self.num_removed for name, other in names.items() if other == inode})
        for table in (self.contents, self.names):
            if inode in table:
                table[-self.num_removed] = table.pop(inode)  # type: ignore[attr-defined]

    def _flush(self, descriptor: int) -> None:
        with self.lock:
            self._note_flush(descriptor)
        self._fsync(descriptor)

    def _note_flush(self, descriptor: int) -> None:
        path, was_on, self.is_on = Path(f"/proc/self/fd/{descriptor}").readlink(), self.is_on, False
        if was_on and path.is_relative_to(self.root):
            self.note()
            if path.is_dir():
                kept = {other.name: other for other in path.iterdir()}
                self.names[path.stat().st_ino] = {name: other.stat().st_ino for name, other in kept.items()}
                for other in kept.values():
                    if other.is_dir():  # a folder that is named but not flushed is empty
                        self.names.setdefault(other.stat().st_ino, {})
            else:
                self.contents[path.stat().st_ino] = path.read_bytes()
        self.is_on = was_on


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 4
    max_steps: int | None = 4
    log_every: int = 1
    save_every: int = 1
    max_grad_norm: float = 0.0
    data: str = "numbers"


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1)}


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["x"]).squeeze(-1)}  # the gradient is 1: each step takes the learning rate away


def built(config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), config.learning_rate)


def note_saves(disk: Disk) -> None:
    """Notes when the save of a step has ended."""
    write = save.write

    def noted(folder: Path, *others: Any) -> None:
        write(folder, *others)
        disk.saved = int(folder.name[-8:])

    save.write = noted


def train(disk: Disk, label: str, config: Config) -> None:
    """A run of label "A" learns at 1 a step, of "B" at 2: weights tell whose they are."""
    disk.label, disk.saved = label, disk.saved if label == "C" else 0
    disk.sync()
    accelerator = start(config)
    model, optimizer = built(config)
    disk.is_on = True
    fit(accelerator, model, optimizer, forward_step, Numbers(), Numbers(), config, export=tokenizer)
    disk.is_on = False


def tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("words")


def make(tree: Tree, folder: Path) -> None:
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)


def resumed(folder: Path, config: Config) -> tuple[str, int, float]:
    """(outcome, step, weight) of a resume: "done", "step", or the line of an error."""
    config = replace(config, output_dir=folder, resume_from_checkpoint="latest", overwrite_output_dir=False)
    model, optimizer = built(config)
    plan, group = Plan.of(config, Layout(), 8), CpuGroup()
    data: Any = {"train_set": Numbers(), "eval_sets": {"": Numbers()}}
    setup = Setup(None, model, optimizer, forward_step, plan, **data)
    this_run = identity(setup, group)
    try:
        with OutputDir(plan, group) as output_dir:
            checkpoint = find_checkpoint(setup, this_run, group)
            if output_dir.is_done(checkpoint.state):
                return "done", checkpoint.state.step, 0.0
            checkpoint.load_weights(model)
            return "step", checkpoint.state.step, float(model.weight)
    except RunError as error:
        return str(error), 0, 0.0


def untrue(
    label: str, has_begun: bool, tree: Tree, folder: Path, configs: dict[str, Config], saved: int
) -> Iterator[str]:
    """Yields what is wrong about a resume from a state.

    Args:
        label: of the run that was interrupted.
        has_begun: whether it had marked what is in the folder as replaced.
        tree: the state.
        folder: where to make it.
        configs: {label: its config}
        saved: the newest step of this run whose save had ended.
    """
    make(tree, folder)
    own, num_steps = configs[label].learning_rate, configs[label].max_steps
    is_earlier = label == "B" and not has_begun  # B had not touched anything
    if label == "C":  # B was done: one of the two models is there at each moment
        yield from model_lacks(tree, "C")
    outcome, step, weight = resumed(folder, configs[label])
    if outcome == "done":
        yield from model_lacks(tree, "done")
        found = float(load_file(folder / "model" / "model.safetensors")["weight"])
        if found != -own * num_steps and not is_earlier:
            yield f"done, with the weight {found}"
        return
    if outcome != "step":
        yield f"it is refused: {outcome}"
    if step and weight != -own * step and not is_earlier:
        yield f"it goes on from step {step} with the weight {weight} of another run"
    if step < saved:
        yield f"it goes on from step {step}, but step {saved} was saved"
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.open()] if path.exists() else []
    missing = set(range(1, step + 1)) - {record["step"] for record in records}
    if missing and not is_earlier:
        yield f"it goes on from step {step} without the records of {sorted(missing)}"


def model_lacks(tree: Tree, when: str) -> Iterator[str]:
    lacks = [name for name in ("model.safetensors", "tokenizer.json") if not tree.get(f"model/{name}")]
    if lacks:
        yield f"{when}: model/ lacks {lacks}"


def main(num_states: int, seed: int) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "disk"
        root.mkdir()
        first = Config(output_dir=root, learning_rate=1.0)
        second = replace(first, learning_rate=2.0, overwrite_output_dir=True)
        longer = replace(second, max_steps=6, overwrite_output_dir=False, resume_from_checkpoint="latest")
        configs = {"A": first, "B": second, "C": longer}
        disk = Disk(root)
        note_saves(disk)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            for label, config in configs.items():
                train(disk, label, config)
        states, begun = [], set[tuple[str, str]]()
        for number, (label, saved, trees) in enumerate(disk.moments):
            begun |= {(label, kind) for kind, tree in trees.items() if label != "B" or "starts_over" in tree}
            states += [(number, label, kind, (label, kind) in begun, tree, saved) for kind, tree in trees.items()]
        drawn = states if num_states == 0 else random.Random(seed).sample(states, min(num_states, len(states)))
        problems = 0
        for index, (number, label, kind, has_begun, tree, saved) in enumerate(drawn):
            folder = Path(scratch) / f"state_{index}"
            folder.mkdir()
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                found = list(untrue(label, has_begun, tree, folder, configs, saved))
            shutil.rmtree(folder)
            problems += bool(found)
            for line in found:
                print(f"{label}, operation {number}, {kind}: {line}: {sorted(tree)}")
    print(f"{len(drawn)} of {len(states)} states, {problems} untrue")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
