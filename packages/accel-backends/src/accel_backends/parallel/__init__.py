"""Axes of a mesh as functions over modules: tensor, context, expert and pipeline parallelism."""
