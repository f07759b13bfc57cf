"""Faults, leaks and children of processes under test."""
