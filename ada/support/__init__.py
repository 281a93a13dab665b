"""What a reader may skip at first: comparing answers, options, ranks, metrics, the run's folder, checkpoints."""
