"""The parity check: repeats the first steps of a run on one process and compares them."""
