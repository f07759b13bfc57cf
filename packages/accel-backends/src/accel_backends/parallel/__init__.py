"""Axes of a mesh as functions over modules: tensor, context and expert parallelism."""
