"""Equivalence of layouts: the same numbers under every backend."""
