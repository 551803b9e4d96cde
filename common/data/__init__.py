"""Datasets and batches."""

from .batches import Batch, ForwardStep, MapDataset
from .padding import pad_to_longest

__all__ = ["Batch", "ForwardStep", "MapDataset", "pad_to_longest"]
