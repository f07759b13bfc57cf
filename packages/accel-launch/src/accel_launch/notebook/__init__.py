"""Notebook support: runs a cell's function on many processes and returns the results."""
