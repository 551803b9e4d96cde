"""The check of a run's first steps against one process."""
