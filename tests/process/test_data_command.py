"""Promise: `accelerate-recipes data` shows what the model gets, of our recipes and of a user's own."""

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image

from accelerate_recipes.common.tasks.vision.images import load_images
from support.launching import fork
from support.recipes import FINETUNE, LINEAR, MNIST
from support.runs import ROOT
from support.tool import tool

OWN = '''
import sys
import torch
from torch import nn
from accelerate_recipes import RunConfig, fit, run, start

WORDS = ["zero", "one", "two", "three"]


class Counting(torch.utils.data.Dataset):
    """Raw texts, of which the collate function makes numbers."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"text": f"\\x1b[31m{WORDS[index % 4]}", "number": index % 4}


def collate(samples):
    return {
        "input_ids": torch.tensor([[len(sample["text"]), sample["number"], 9] for sample in samples]),
        "text": [sample["text"] for sample in samples],
    }


def main(config):
    model = nn.Linear(3, 1)
    step = lambda model, batch: {"loss": model(batch["input_ids"].float())[:, 0].square()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(start(config), model, optimizer, step, Counting(), Counting(), config, collate_fn=collate)


if __name__ == "__main__":
    run(main, RunConfig)
'''


Ask = Callable[..., str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*arguments: str) -> str:
        assert tool(monkeypatch, "data", *arguments) == 0
        return capsys.readouterr().out

    return ask


def test_images_are_those_of_the_data(asked: Ask, tmp_path: Path) -> None:
    told = asked(str(ROOT / MNIST), "--samples", "3", "--output", str(tmp_path / "data.html"), "--json")
    found, (train_set, _) = json.loads(told), load_images("digits")
    assert found["sizes"] == {"training": {"": 1438}, "evaluation": {"": 359}}
    assert dict(found["values"]["label"])["7"] == int((train_set.labels == 7).sum())
    page = (tmp_path / "data.html").read_text()
    images = re.findall('src="data:image/png;base64,([^"]*)"', page)
    assert len(found["samples"]) == len(images) == 3 and "://" not in page
    for sample, image in zip(found["samples"], images):
        shown = numpy.asarray(Image.open(io.BytesIO(base64.b64decode(image))))
        factor = len(shown) // 8
        assert (shown[::factor, ::factor] == train_set.images[sample["id"], 0].numpy()).all()
        assert {"name": "label", "text": str(int(train_set.labels[sample["id"]]))} in sample["parts"]


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.full), ("--packing",)])
def test_trained_tokens_are_marked(asked: Ask, tmp_path: Path, flags: tuple[str, ...]) -> None:
    rows = [{"prompt": f"day {day}?", "completion": f"2024-01-{day:02}"} for day in range(1, 29)]
    (tmp_path / "days.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", str(tmp_path / "days.jsonl"), "--batch_size", "2", *flags]
    told = asked(str(ROOT / FINETUNE), "--samples", "2", "--output", str(tmp_path / "a.html"), "--", *data)
    expected = r"U day (\d+)\?\\x03A «2024-01-(\d+)\\x03»"
    shown = re.findall(expected, told)
    assert len(shown) >= 2 and all(int(day) == int(answer) for day, answer in shown)
    assert told.count("«") == len(shown) + 1  # and in the line that explains it
    page = (tmp_path / "a.html").read_text()
    assert len(re.findall(r"<mark>2024-01-\d\d\\x03</mark>", page)) == len(shown)
    assert ("<hr>" in page) == bool(flags) and "27 training samples" not in told


def test_a_recipe_of_a_user(asked: Ask, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    told = asked(str(tmp_path / "own.py"), "--samples", "2", "--", "--batch_size", "8")
    assert "training: 40 samples" in told and "batch: input_ids int64 (8, 3), text texts" in told
    sample, word = re.search(r"sample (\d+)\n(?:.*\n)*?text: \\x1b\[31m(\w+)", told).groups()
    assert word == ["zero", "one", "two", "three"][int(sample) % 4] and "\x1b" not in told


def test_a_part_of_a_set(asked: Ask, tmp_path: Path) -> None:
    """A set that holds another one in its `dataset`, as torch's Subset does, is looked at itself."""
    text = OWN.replace("Counting(), Counting(), config, collate_fn=collate", "part, part, config")
    text = text.replace('{"text": f"\\x1b[31m{WORDS[index % 4]}", ', '{"input_ids": torch.tensor([index, 1, 2]), ')
    text = text.replace("    fit(", "    part = torch.utils.data.Subset(Counting(), range(2, 40, 4))\n    fit(")
    (tmp_path / "own.py").write_text(text)
    told = asked(str(tmp_path / "own.py"), "--samples", "2", "--", "--batch_size", "5")
    assert "training: 10 samples" in told and "number in 10 samples: 2: 10" in told


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing.py"], "nothing.py"),
        ([str(ROOT / MNIST), "--output", "no/folder/a.html"], "there is no folder no/folder; create it"),
        (
            [str(ROOT / MNIST), "--", "--data", "./nothing"],
            "--data ./nothing: no such file or folder; use --data digits",
        ),
        ([str(ROOT / MNIST), "--", "--batch_size", "5000"], "--batch_size 5000"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool(monkeypatch, "data", *arguments) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_a_run_says_it_and_its_card_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "numbers.csv").write_text("a,b\n" + "".join(f"{n},{2 * n}\n" for n in range(50)))
    (tmp_path / "rows" / "notes.txt").write_text("hello")
    run = fork(tmp_path / "run", "ddp", LINEAR, f"--data {tmp_path / 'rows'} --target b --batch_size 10 --max_steps 2")
    lines = [
        f"files of --data {tmp_path / 'rows'}, by their names: 1 for train, 1 not read, such as notes.txt",
        "50 training samples, 50 for evaluation",
    ]
    assert run.exit_code == 0 and run.card["data"] == lines
    assert all(run.stdout.count(line) == 1 for line in lines)
