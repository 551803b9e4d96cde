"""Datasets and batches."""

from common.data.batches import Batch, ForwardStep, MapDataset
from common.data.padding import pad_to_longest

__all__ = ["Batch", "ForwardStep", "MapDataset", "pad_to_longest"]
