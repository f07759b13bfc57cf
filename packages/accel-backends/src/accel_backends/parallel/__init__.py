"""Axes of a mesh as functions over modules: tensor and context parallelism, one module each."""
