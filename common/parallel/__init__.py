"""The kinds of parallelism, one module each."""
