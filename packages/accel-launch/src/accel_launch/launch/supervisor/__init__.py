"""Supervision of the processes of one machine."""
