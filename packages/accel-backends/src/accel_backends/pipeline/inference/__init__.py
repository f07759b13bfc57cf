"""Pipelines for inference: calls of a model run its stages, with the arguments that rank 0 was called with."""
