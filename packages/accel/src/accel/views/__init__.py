"""Stateless parts of an Accelerator's interface."""
