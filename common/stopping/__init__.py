"""Stops a run on signals, non-finite numbers and hangs."""
