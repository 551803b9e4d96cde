"""Checkpoints (find, verify, load, save), their format on disk, and the exported model."""
