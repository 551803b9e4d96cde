"""The start of a run: checks the launch, then joins the processes."""
