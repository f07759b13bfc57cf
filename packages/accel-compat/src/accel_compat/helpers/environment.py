"""Values of environment variables, read as Accelerate reads them."""

import os


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Returns 1 or 0 (True or False with ``to_bool``) of a word for yes or no.

    Raises:
        ValueError: another word.
    """
    word = value.lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True if to_bool else 1
    if word in ("n", "no", "f", "false", "off", "0"):
        return False if to_bool else 0
    raise ValueError(f"invalid truth value {word}")


def parse_flag_from_env(key: str, default: bool | int = False) -> bool:
    """Returns the flag in the environment variable ``key``."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Returns the text of the environment variable ``key``."""
    return os.environ.get(key, str(default))
