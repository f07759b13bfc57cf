"""Attention over sequences that are sharded across ranks."""
