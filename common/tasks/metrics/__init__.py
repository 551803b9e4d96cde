"""Measures of an evaluation, and losses that compare samples."""
