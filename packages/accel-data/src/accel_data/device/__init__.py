"""Batches on the device of the step."""
