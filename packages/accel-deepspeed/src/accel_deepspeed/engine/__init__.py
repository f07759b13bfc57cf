"""Engines of DeepSpeed: making, binding and optimizers."""
