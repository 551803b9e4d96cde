"""Datasets and batches."""

from .collate import pad_to_longest
from .facts import say
from .mixed import Mixture, parts_of
from .sets import Batch, Examples, ForwardStep, InMemoryDataset, MapDataset, Metrics

__all__ = ["Batch", "Examples", "ForwardStep", "InMemoryDataset", "MapDataset", "Metrics", "Mixture"]
__all__ += ["pad_to_longest", "parts_of", "say"]
