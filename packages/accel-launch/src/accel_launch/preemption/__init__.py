"""Preemption of a run: detected on any rank, agreed by all, told to the launcher by the exit status."""
