"""Read amplification of a loader, as text."""


def read_text(amplification: int | None) -> str:
    """Describes a loader's read amplification."""
    if amplification is None:
        return "reading will tell how often each sample is read"
    return f"each sample is read {'once' if amplification == 1 else f'{amplification} times'}"
