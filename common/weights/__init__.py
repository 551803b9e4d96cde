"""Weights, whole or sharded: which process has which part, in memory and on disk."""
