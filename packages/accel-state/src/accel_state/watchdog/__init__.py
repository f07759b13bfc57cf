"""Hang watchdog: reports the operation and source line of each rank when ranks wait for one that is missing."""
