"""Promise: no step waits for a GPU, but where docs/speed.md says so. The device of this test does not exist."""

import json
import subprocess
import sys

import pytest

from support.launching import environment
from support.recipes import (
    DIFFUSION,
    EMBEDDINGS,
    FINETUNE,
    IMAGE_CLASSIFICATION,
    LINEAR,
    MNIST,
    PREFERENCES,
    TEXT_CLASSIFICATION,
    TRANSFORMER,
)
from support.runs import ROOT

CLASSES = "--num_layers 1 --max_length 32 --hidden_size 32 --vocabulary 64 --batch_size 512"
TEXT = f"--num_layers 1 --data {ROOT / 'LICENSE'} --batch_size 32"
RECIPES = {
    MNIST: "",
    LINEAR: "",
    TEXT_CLASSIFICATION: CLASSES,
    TRANSFORMER: TEXT,
    FINETUNE: "",
    DIFFUSION: "--num_layers 1",
    PREFERENCES: "",
    EMBEDDINGS: CLASSES,
    IMAGE_CLASSIFICATION: "--image_size 16 --patch_size 8 --hidden_size 32 --num_layers 1 --batch_size 32",
}
# The values of each sample, which `examples` gets beside the means: four of a batch, and one more of images. All
# processes agree on the sizes of values of several dimensions, of which embeddings has three: two waits for each.
OF_EVALUATION = {TEXT_CLASSIFICATION: 5, EMBEDDINGS: 6 + 3 * 2, IMAGE_CLASSIFICATION: 6}
PASS = "find_packed_sequence_indices"  # of transformers
# (precision, recipe, flags) -> the waits of a step
CASES = {
    **{("no", recipe, flags): {} for recipe, flags in RECIPES.items()},
    **{("bf16", recipe, RECIPES[recipe]): {} for recipe in (TEXT_CLASSIFICATION, DIFFUSION)},
    **{("fp16", recipe, RECIPES[recipe]): {"step": 1} for recipe in (MNIST, TRANSFORMER)},
    ("no", TRANSFORMER, f"{TEXT} --attention eager"): {PASS: 1},
    ("bf16", FINETUNE, "--packing"): {PASS: 1},
    ("no", FINETUNE, "--optimizer adafactor"): {"_step": 2 * 38},  # twice for each weight
    ("no", MNIST, "--plant"): {"<lambda>": 1},  # shows that waits are counted
}


# One of each kind, for `make test`.
FEW = [("no", MNIST, ""), ("bf16", TEXT_CLASSIFICATION, CLASSES), ("fp16", MNIST, "")]
FEW += [
    ("no", TRANSFORMER, f"{TEXT} --attention eager"),
    ("bf16", FINETUNE, "--packing"),
    ("no", MNIST, "--plant"),
]


@pytest.mark.full
@pytest.mark.parametrize("keys", [FEW, [*CASES]], ids=["few", "all"])
def test_no_step_waits_are_those_that_the_page_names(keys: list[tuple[str, str, str]]) -> None:
    cases = [*keys, ("no", MNIST, "--mix")]
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "fake_device.py"), json.dumps(cases)]
    run = subprocess.run(command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *measured, mixed = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    steps = [{place.split(":")[-1]: number for place, number in found["step"].items()} for found in measured]
    assert dict(zip(keys, steps, strict=True)) == {key: CASES[key] for key in keys}
    for (_, recipe, flags), found in zip(keys, measured):
        if flags == RECIPES[recipe]:
            assert sum(found["evaluation"].values()) == OF_EVALUATION.get(recipe, 1)
    assert "devices" in mixed["error"]
