"""What a reader may skip at first: the grading process, options, ranks, metrics, files, the run's folder, checkpoints."""
