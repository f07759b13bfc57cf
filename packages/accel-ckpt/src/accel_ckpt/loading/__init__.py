"""Loading: reading, verifying and resharding of a committed checkpoint."""
