"""Preemption and requeueing."""
