"""Rank processes of a test."""
