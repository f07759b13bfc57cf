"""Reading and, for a while, changing environment variables."""


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on, 1; 0 for n, no, f, false, off, 0, in any case (True and False with ``to_bool``).

    Raises:
        ValueError: anything else.
    """
    word = value.strip().lower()
    if word in {"y", "yes", "t", "true", "on", "1"}:
        return True if to_bool else 1
    if word in {"n", "no", "f", "false", "off", "0"}:
        return False if to_bool else 0
    raise ValueError(f"invalid truth value {value!r}; expected one of yes, true, on, 1, no, false, off, 0")
