"""Datasets and batches."""

from common.data.batches import Batch, ForwardStep, MapDataset

__all__ = ["Batch", "ForwardStep", "MapDataset"]
