"""What ends a run: exit codes, signals, numbers that are not finite, hangs."""
