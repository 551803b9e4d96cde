"""Datasets and batches."""

from .batches import Batch, Examples, ForwardStep, MapDataset, Metrics
from .padding import pad_to_longest

__all__ = ["Batch", "Examples", "ForwardStep", "MapDataset", "Metrics", "pad_to_longest"]
