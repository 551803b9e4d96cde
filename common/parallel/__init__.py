"""How an optimizer step differs between Accelerate, DeepSpeed and pipelines."""
