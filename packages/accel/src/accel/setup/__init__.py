"""Construction of an Accelerator."""
