"""Models of transformers, and parameter groups for an optimizer."""
