"""The files that a run writes: records, the run card, profiles; and the output folder."""
