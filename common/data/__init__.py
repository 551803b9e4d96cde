"""Datasets and batches."""

from .collate import pad_to_longest
from .facts import say
from .mixed import Mixture, parts_of
from .sets import Batch, Examples, ForwardStep, MapDataset, Metrics

__all__ = ["Batch", "Examples", "ForwardStep", "MapDataset", "Metrics", "Mixture", "pad_to_longest", "parts_of", "say"]
