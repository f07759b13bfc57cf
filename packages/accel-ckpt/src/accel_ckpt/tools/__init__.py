"""Tools for checkpoints: inspection, export and resharding of files."""
