"""Exceptions of this package."""


class PrecisionError(ValueError):
    """A precision that cannot be parsed, or that this device, library or model cannot compute."""
