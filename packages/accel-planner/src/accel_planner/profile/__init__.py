"""Profile of a model: memory and compute of each module."""
