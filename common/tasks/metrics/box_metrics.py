"""The average precision of boxes, as COCO measures it."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from torch import Tensor


def make_box_measure() -> Callable[..., dict[str, float]]:
    """A function (boxes, label, score, true boxes, true label, is_crowd) -> {"map": the average precision of
    pycocotools, as a mean over the classes and over IoU thresholds from 0.5 to 0.95; "map_50", "map_75": at 0.5, 0.75}.

    Boxes have the shape (images, boxes, 4) and are left, top, width and height in pixels; the others (images, boxes).
    A true label below 0 is padding. Without true boxes, all values are -1.
    """
    from pycocotools.coco import COCO  # type: ignore[import-untyped]
    from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

    def as_coco(bbox: Tensor, category_id: Tensor, **more: Tensor) -> Any:
        is_real, columns = category_id >= 0, {"bbox": bbox, "category_id": category_id} | more
        rows = zip(is_real.nonzero()[:, 0].tolist(), *(each[is_real].tolist() for each in columns.values()))
        found, names = COCO(), ("id", "image_id", *columns)
        boxes = [dict(zip(names, (number, *row))) for number, row in enumerate(rows, start=1)]
        areas = [{"area": box["bbox"][2] * box["bbox"][3]} for box in boxes]
        found.dataset = {"annotations": [box | area for box, area in zip(boxes, areas)], "categories": []}
        found.createIndex()
        return found

    def measure(*found_and_right: Tensor) -> dict[str, float]:
        boxes, label, score, true_boxes, true_label, is_crowd = found_and_right
        with redirect_stdout(io.StringIO()):  # it prints tables
            right = as_coco(true_boxes, true_label, iscrowd=is_crowd)
            evaluation = COCOeval(right, as_coco(boxes, label, score=score), "bbox")
            evaluation.params.imgIds = [*range(len(label))]
            evaluation.params.catIds = true_label[true_label >= 0].unique().tolist()
            evaluation.params.areaRng, evaluation.params.areaRngLbl = evaluation.params.areaRng[:1], ["all"]
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return dict(zip(("map", "map_50", "map_75"), map(float, evaluation.stats)))

    return measure
