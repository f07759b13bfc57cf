"""Conversion of Transformers models to megatron-core and back."""
