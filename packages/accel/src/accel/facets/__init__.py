"""Mixins of the Accelerator, one for each topic."""
