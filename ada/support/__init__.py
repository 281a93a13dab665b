"""What the other files build on: nothing here knows of sampling or training."""
