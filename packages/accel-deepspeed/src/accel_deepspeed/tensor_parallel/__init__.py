"""Tensor parallelism with DeepSpeed's AutoTP."""
