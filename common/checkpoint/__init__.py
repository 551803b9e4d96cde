"""Checkpoints: find, verify, load and save them; their format on disk; the exported model."""
