"""Trackers of experiment-tracking services."""
