"""Nested containers of tensors (pytrees)."""
