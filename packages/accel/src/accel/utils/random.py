"""Seeds and random state."""
