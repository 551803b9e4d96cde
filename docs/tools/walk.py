"""Follows one training step through `common/`, and writes the walk into docs/architecture.md, or into a copy of it.

python docs/tools/walk.py
"""

import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import getdoc, getsourcelines
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
COMMON, PAGE = ROOT / "accelerate_recipes" / "common", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- Written by docs/tools/walk.py -->\n", "<!-- End of the walk -->\n"
PLUGS = ("check", "records", "stopping", "cpu_group.py")  # what watches, records and stops a run
WATCHED_STEP = 5  # the first steps are checked, and do more


@dataclass
class Stop:
    """A function on the walk.

    Attributes:
        file: within `common/`.
        line: of its definition.
        name: with its class.
        lines: how many it has, without docstring, comments and blank lines.
        what: the first sentence of its docstring.
    """

    file: str
    line: int
    name: str
    lines: int
    what: str

    @property
    def is_plug(self) -> bool:
        """Whether it only watches, records or stops the run."""
        return self.file.split("/")[0] in PLUGS


def walked() -> list[Stop]:
    """The functions of `common/` that one step calls, in order, with a process of its own."""
    import torch
    from torch import nn
    from torch.utils.data import Subset

    from accelerate_recipes.common import loop
    from accelerate_recipes.common.config import RunConfig
    from accelerate_recipes.common.launch.start import start
    from accelerate_recipes.common.tasks.vision.images import ImageDataset

    found: dict[CodeType, FunctionType | None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(COMMON):
            found.setdefault(frame.f_code, None)

    class Watch(loop.Watch):
        def after_step(self, step: int, result: Any) -> None:
            """The last thing that `fit` does in a step without a record."""
            super().after_step(step, result)
            sys.setprofile(note if step == WATCHED_STEP - 1 else None)

    data = ImageDataset(torch.zeros(64, 1, 4, 4, dtype=torch.uint8), torch.arange(64) % 10, num_classes=10)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
    original, loop.Watch = loop.Watch, Watch  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            config = RunConfig(batch_size=32, max_steps=9, log_every=100, eval_every=100, output_dir=Path(folder))
            optimizer = torch.optim.AdamW(model.parameters())
            loop.fit(start(config), model, optimizer, _forward_step, data, Subset(data, [0]), config)
    finally:
        sys.setprofile(None)
        loop.Watch = original  # type: ignore[misc]
    return [_stop(code) for code in found if not code.co_name.startswith("<")]


def _forward_step(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    from torch.nn import functional as F

    return {"loss": F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")}


def _stop(code: CodeType) -> Stop:
    source, line = getsourcelines(code)
    text = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else ""
    length = len([each for each in source if each.strip() and not each.strip().startswith("#")])
    length -= len(text.strip().splitlines()) if text else 0
    file = str(Path(code.co_filename).relative_to(COMMON))
    what = " ".join((getdoc_of(text)).split()).split(". ")[0].rstrip(".")
    return Stop(file, line, code.co_qualname.replace(".<locals>", ""), length, what)


def getdoc_of(text: str) -> str:
    """A docstring without its indent."""

    def holder() -> None: ...

    holder.__doc__ = text
    return getdoc(holder) or ""


def table(stops: list[Stop]) -> str:
    """The walk as Markdown."""
    core = [stop for stop in stops if not stop.is_plug and not stop.file.startswith("tasks/")]
    plugs = sorted({stop.file for stop in stops if stop.is_plug})
    files = dict.fromkeys(stop.file for stop in core)
    lines = [
        f"{len(core)} functions in {len(files)} files, {sum(stop.lines for stop in core)} lines without docstrings; "
        f"beside them {', '.join(f'`{file}`' for file in plugs)} watch, record and stop the run.",
        "",
        "| function | lines | what it does |",
        "| --- | ---: | --- |",
    ]
    for stop in core:
        place = f"[common/{stop.file}:{stop.line}](../common/{stop.file})"
        lines.append(f"| {place} `{stop.name}` | {stop.lines} | {stop.what.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def written(page: str, walk: str) -> str:
    """The page with this walk in it."""
    return page[: page.index(BEGIN)] + BEGIN + walk + page[page.index(END) :]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(written(page.read_text(), table(walked())))
