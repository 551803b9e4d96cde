"""How a run ends: exit codes, signals, non-finite numbers, hangs."""
