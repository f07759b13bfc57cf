"""Series of checkpoints in one folder, and their retention."""
