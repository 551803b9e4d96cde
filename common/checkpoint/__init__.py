"""Checkpoints and the exported model: find, verify, load, save, export; and their format on disk."""
