"""One optimizer step: the engine, the loss, the optimizer and its state, and checks of what the user passes."""
