"""Roles that a backend has: layout of ranks, gradients, states; the base classes mean "as on one device"."""
