"""One optimizer step: the engine that takes it, what it is given, its loss and its state."""
