"""Promise: images vary as their flags say, and labels with them."""

from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.metrics.class_metrics import Confusion, average_precision, weights_of_classes
from accelerate_recipes.common.tasks.reading.labelled import Labelled
from accelerate_recipes.common.tasks.reading.labelled_images import load_image_splits
from accelerate_recipes.common.tasks.vision.augmentation import (
    AugmentationFlags,
    erase,
    mix,
    normalise,
)
from accelerate_recipes.common.tasks.vision.cropped_images import CroppedImages, Preprocessing
from accelerate_recipes.common.tasks.vision.images import load_images
from recipes import image_classification

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def test_colours_are_those_of_three_steps() -> None:
    levels = torch.randint(256, (3, 500)).float()
    pixels = levels / 255 * 1.2
    pixels = pixels.mean() + 0.7 * (pixels - pixels.mean())
    grey = pixels.mean(0)
    pixels = (grey + 1.3 * (pixels - grey)).clamp(0, 1)
    expected = (pixels - torch.tensor(MEAN)[:, None]) / torch.tensor(STD)[:, None]
    torch.testing.assert_close(normalise(levels, MEAN, STD, (1.2, 0.7, 1.3)), expected, atol=1e-5, rtol=0)


def test_a_rectangle_is_erased() -> None:
    torch.manual_seed(0)
    shares = []
    for _ in range(300):
        hole = erase(torch.ones(3, 20, 30))[0] == 0
        rows, columns = hole.any(1).sum(), hole.any(0).sum()
        assert hole.sum() == rows * columns  # one rectangle
        shares.append(float(hole.float().mean()))
        assert (erase(torch.ones(3, 4, 64)) == 0).any()  # in a narrow image, too
    assert min(shares) > 0.01 and max(shares) < 0.36 and numpy.mean(shares) == pytest.approx(0.17, abs=0.03)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.5, 0), (0, 1), (1, 1)])
def test_the_share_of_a_mixed_image_is_that_of_its_pixels(mixup: float, cutmix: float) -> None:
    shares = []
    for _ in range(200):
        pixels, share = mix(torch.ones(3, 16, 12), torch.zeros(3, 16, 12), mixup, cutmix)
        assert float(pixels.mean()) == pytest.approx(share, abs=1e-6)
        assert mixup or {*pixels.unique().tolist()} <= {0, 1}
        shares.append(share)
    assert numpy.std(shares) > 0.1


def test_loss_of_a_mixed_image() -> None:
    logits, label, other, share = (
        torch.randn(4, 3),
        torch.tensor([0, 1, 2, 0]),
        torch.tensor([2, 2, 1, 1]),
        torch.rand(4),
    )
    target = share[:, None] * F.one_hot(label, 3) + (1 - share[:, None]) * F.one_hot(other, 3)
    batch = {"image": logits, "label": label, "other_label": other, "share": share}

    def model(pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=pixel_values)

    found = image_classification.make_forward_step(0.0, num_classes=3, has_several=False)(model, batch)["loss"]
    torch.testing.assert_close(found, F.cross_entropy(logits, target, reduction="none"))


def images(labels: list, classes: list[str]) -> Labelled:
    return Labelled([Image.new("RGB", (8, 8))] * len(labels), labels, classes)


def test_weighted_classes_are_those_of_cross_entropy() -> None:
    """The loop divides the sum of weight × loss by the sum of the weights."""
    part = images([0, 1, 1, 2, 2, 2], ["a", "b", "c"])
    assert weights_of_classes("balanced", [part], are_mixed=False) == [2, 1, pytest.approx(2 / 3)]
    weights = weights_of_classes("a:3,c:0.5", [part], are_mixed=False)
    assert weights == [3, 1, 0.5]
    samples = CroppedImages(part, Preprocessing(8), AugmentationFlags(), weights)
    weight, label = (torch.tensor([float(samples[row][key]) for row in range(6)]) for key in ("weight", "label"))
    logits = torch.randn(6, 3)
    losses = F.cross_entropy(logits, label.long(), reduction="none")
    expected = F.cross_entropy(logits, label.long(), weight=torch.tensor(weights))
    torch.testing.assert_close((weight * losses).sum() / weight.sum(), expected)


def test_average_precision_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    generator = torch.Generator().manual_seed(0)
    label = torch.randint(2, (60, 4), generator=generator)
    probability = torch.randint(20, (60, 4), generator=generator)  # many are equal
    label[:, 3] = 0  # no image has the class
    expected = average_precision_score(label[:, :3], probability[:, :3], average="macro")
    found = average_precision({"probability": probability, "label": label})
    assert found == {"mean_average_precision": pytest.approx(expected, abs=1e-12)}


def test_confusion_counts() -> None:
    confusion = Confusion(["a", "b", "c"])
    found = confusion({"label": torch.tensor([0, 0, 0, 0, 1]), "predicted": torch.tensor([0, 0, 0, 2, 1])})
    assert found == {"balanced_accuracy": pytest.approx((3 / 4 + 1) / 2)}  # no image of class c
    assert confusion.counts is not None and confusion.counts.tolist() == [[3, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_several_classes_of_a_table(tmp_path: Path) -> None:
    import datasets

    cells = [{"bytes": (tmp_path / "x").name.encode(), "path": None}] * 3
    for lists, classes in (([[1, 0], [], [2]], ["0", "1", "2"]), ([["b", "a"], [], ["c"]], ["a", "b", "c"])):
        datasets.Dataset.from_dict({"image": cells, "labels": lists}).to_parquet(tmp_path / "train.parquet")
        (part,) = load_image_splits(str(tmp_path), "")
        assert (part.labels, part.classes, part.has_several) == ([(1, 0), (), (2,)], classes, True)
        assert part.reorder([*classes[::-1], "d"]).labels == [(1, 2), (), (0,)]
    assert part.samples.files[1:3] == cells[1:]
    with pytest.raises(UsageError, match="several classes: use recipes"):
        load_images(str(tmp_path))
    sample = CroppedImages(images([(0, 2), ()], ["a", "b", "c"]), Preprocessing(8))
    assert [sample[row]["label"].tolist() for row in range(2)] == [[1, 0, 1], [0, 0, 0]]
