"""The files that a run writes: records, the run card and the output folder."""
