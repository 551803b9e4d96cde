"""Promise: the exported model makes images of the class that it is asked for."""

import json
import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

from accelerate_recipes.common.tasks.vision.images import load_images
from support.launching import fork
from support.recipes import DIFFUSION
from support.runs import ROOT, TOLERANCE, Run, refused

SMALL = "--epochs 14 --warmup_steps 20 --hidden_size 64 --ema_decay 0.98 --eval_every 1000 --num_steps 20"


def share_of_right_images(run: Run) -> tuple[int, int]:
    """(percent, number of images)"""
    percent, number = re.search(r": (\d+)% of (\d+) images show the requested class", run.stdout).groups()
    return int(percent), int(number)


@pytest.mark.full
def test_exported_model_makes_images_of_a_class(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", DIFFUSION, f"{SMALL} --num_pictures 5")
    percent, number = share_of_right_images(run)
    assert number == 50 and percent >= 60
    assert Image.open(run.output_dir / "pictures.png").size == (10 * 10 * 4, 5 * 10 * 4)  # 8 x 8, a frame, four times
    # Without guidance the class does not count, so that one image in ten is right.
    again = fork(run.output_dir, "single", DIFFUSION, f"{SMALL} --num_pictures 20 --guidance 0 --evaluate_only")
    percent, number = share_of_right_images(again)
    assert number == 200 and percent <= 30
    # The evaluation draws the same noise in each run.
    loss = json.loads((run.output_dir / "evaluation.json").read_text())["metrics"]["loss"]
    assert loss == pytest.approx(run.column("eval/loss")[-1], rel=TOLERANCE)


def test_nearest_training_image_recognises_digits() -> None:
    share_recognised = runpy.run_path(str(ROOT / DIFFUSION))["share_recognised"]
    train_set, eval_set = load_images("digits")
    images, labels = eval_set.__getitems__(list(range(len(eval_set)))).values()
    assert share_recognised(images, labels, [train_set]) > 0.97
    assert share_recognised(images, (labels + 1) % 10, [train_set]) < 0.03


@pytest.mark.full
def test_result_of_the_docstring(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", DIFFUSION)
    assert share_of_right_images(run)[0] >= 97 and run.column("eval/loss")[-1] < 0.37


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--patch_size 3", "--patch_size 3 does not divide images of 8 x 8: use one of 1, 2, 4, 8"),
        ("--num_heads 5", "--hidden_size 96 does not divide into 5 heads: use --hidden_size 95"),
        ("--hidden_size 10000000", "can't allocate memory: you tried to allocate 400000000000000 bytes"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", DIFFUSION, flags, succeeds=False))
