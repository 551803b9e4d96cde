"""Weights, whole or divided: which process holds which part, in memory and on disk."""
