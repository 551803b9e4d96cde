"""The strategies of parallelism, one module each."""
