"""What a reader may skip at first: grading process, options, ranks, metrics, files, the run's folder, checkpoints."""
