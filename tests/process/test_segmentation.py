"""Promise: segmentation.py takes the steps of transformers' run_semantic_segmentation, has the measures of
torchmetrics, and exports what a pipeline loads, with the same result."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from support import peers
from support.launching import fork
from support.masks import CLASSES, FORM, IGNORED, SIZE, write_masks, write_segformer
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused

SCRIPT, _ = RECIPES["segmentation"]


def read(folder: Path, part: str) -> list[dict[str, Any]]:
    """The images as a processor of transformers makes them, and their masks."""
    samples = []
    for path in sorted((folder / part / "images").iterdir()):
        pixels = torch.from_numpy(numpy.asarray(Image.open(path)).copy()).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(FORM[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        mask = numpy.asarray(Image.open(folder / part / "masks" / path.name)).astype(numpy.int64)
        samples.append({"pixel_values": (pixels - mean) / std, "labels": torch.from_numpy(mask)})
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmentation")
    write_masks(folder / "data")
    write_segformer(folder / "model")
    return folder


def flags_of(folder: Path) -> str:
    whole = "--least_area 1 --colours 0"  # images that do not vary
    return f"{peers.FLAGS} --data {folder / 'data'} --model_name_or_path {folder / 'model'} {whole}"


def of_pipeline(folder: Path, output_dir: Path) -> list[numpy.ndarray]:
    """The class of each pixel of the held-out images."""
    from transformers import pipeline

    segment = pipeline("image-segmentation", model=str(output_dir / "model"))
    found = []
    for path in sorted((folder / "data" / "test" / "images").iterdir()):
        classes = numpy.zeros((SIZE, SIZE), numpy.int64)
        for part in segment(Image.open(path)):
            classes[numpy.asarray(part["mask"]) > 0] = int(part["label"])
        found.append(classes)
    return found


def test_losses_measures_and_the_export(tmp_path: Path, folder: Path) -> None:
    run = fork(tmp_path / "run", "single", SCRIPT, flags_of(folder))
    samples = read(folder / "data", "train")
    expected = peers.losses(write_segformer(tmp_path / "model"), samples, torch.utils.data.default_collate)
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    found = torch.tensor(numpy.stack(of_pipeline(folder, run.output_dir)))
    right = torch.stack([sample["labels"] for sample in read(folder / "data", "test")])
    options = {"num_classes": CLASSES, "ignore_index": IGNORED}
    theirs = {
        "mean_iou": MulticlassJaccardIndex(**options)(found, right),
        "accuracy": MulticlassAccuracy(average="micro", **options)(found, right),
    }
    for name, value in theirs.items():
        assert run.column(f"eval/{name}")[-1] == pytest.approx(float(value), abs=1e-6)
    line = fork(run.output_dir, "single", SCRIPT, f"--predict {folder}/data/test/images/000.png").stdout.splitlines()[0]
    assert line.startswith(f"{found[0].min()}: ")
    assert Image.open(run.output_dir / "predicted.png").size == (SIZE, SIZE)


def test_measures_are_those_of_torchmetrics() -> None:
    """Also if a class is nowhere, and if only one of predictions and masks has it."""
    from recipes.segmentation import forward_step, measures

    class Model(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            from transformers.modeling_outputs import SemanticSegmenterOutput

            return SemanticSegmenterOutput(logits=pixel_values)

    torch.manual_seed(0)
    images, mask = torch.randn(7, 9, 5, 6), torch.randint(-1, 6, (7, 10, 12))
    images[:, 7:] -= 20
    mask[mask < 0] = -100
    batch = {"image": images, "mask": mask, "weight": (mask >= 0).flatten(1).sum(1).float()}
    ours = measures(forward_step(Model().eval(), batch))
    logits = torch.nn.functional.interpolate(images, (10, 12), mode="bilinear")
    options = {"num_classes": 9, "ignore_index": -100}
    assert ours["mean_iou"] == pytest.approx(float(MulticlassJaccardIndex(**options)(logits, mask)), abs=1e-6)
    theirs = MulticlassAccuracy(average="micro", **options)(logits, mask)
    assert ours["accuracy"] == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=pytest.mark.full)
        for config in ("ddp", "fsdp2", "deepspeed_zero3", "pipeline_parallel", "fsdp2_pipeline")
    ],
)
def test_one_result_of_a_pretrained_model(tmp_path: Path, folder: Path, config: str) -> None:
    """Whose BatchNorm would give another one. Its images vary."""
    flags = flags_of(folder).replace("--least_area 1 --colours 0", "--mirror")
    stages = " --pipeline_stages 2" * ("pipeline" in config)
    expected, run = (
        fork(tmp_path / name, name, SCRIPT, flags + more) for name, more in (("single", ""), (config, stages))
    )
    assert_same_result(run, expected)


def test_a_head_for_other_classes_is_new(tmp_path: Path, folder: Path) -> None:
    write_segformer(tmp_path / "model", 7)
    names = dict(enumerate(("red", "green", "blue", "yellow")))
    (tmp_path / "names.json").write_text(json.dumps(names))
    flags = f"{flags_of(folder)} --model_name_or_path {tmp_path / 'model'} --class_names {tmp_path / 'names.json'}"
    run = fork(tmp_path / "run", "single", SCRIPT, flags)
    assert "new weights: decode_head.classifier" in run.stdout
    config = json.loads((run.output_dir / "model" / "config.json").read_text())
    assert [*config["id2label"].values()] == [*names.values()]


def test_a_model_that_is_none(tmp_path: Path, folder: Path) -> None:
    line = refused(fork(tmp_path / "run", "single", SCRIPT, "--predict a.png", succeeds=False))
    assert "train first (the same command without --predict)" in line


@pytest.mark.full
def test_digits(tmp_path: Path) -> None:
    assert fork(tmp_path / "run", "ddp", SCRIPT).column("eval/mean_iou")[-1] > 0.4
