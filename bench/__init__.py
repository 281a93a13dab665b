"""Measurements: each script compares something with its plain alternative and prints the ratio last. See README.md."""

import ada  # noqa: F401  (first: it sets the number of threads, which torch reads on import)
