"""Faults, leak checks, and tracking of child processes of tests."""
