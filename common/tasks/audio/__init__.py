"""Recordings of speech and other sounds."""
