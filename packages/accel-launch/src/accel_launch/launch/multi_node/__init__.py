"""Launches on several machines that find each other."""
