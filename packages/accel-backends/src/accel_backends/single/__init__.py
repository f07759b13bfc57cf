"""Training on one device."""
