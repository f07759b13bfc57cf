"""Saving: plan, transaction and commit of a checkpoint."""
