"""Dispatch: one rank reads, and every rank receives its rows."""
