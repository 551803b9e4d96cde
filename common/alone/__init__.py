"""Trains with the user's own objects in a world of one process, and restores them afterwards."""
