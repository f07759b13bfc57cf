"""Storage of checkpoints: local folders and object stores."""
