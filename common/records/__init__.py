"""What a run leaves behind: records, the run card, the output folder, profiles."""
