"""One optimizer step, and what differs between Accelerate, DeepSpeed and pipelines."""
