"""Reports: every format is bytes made from a run's frames, and nothing else."""
