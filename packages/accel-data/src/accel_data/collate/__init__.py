"""Collation of samples of different lengths."""
