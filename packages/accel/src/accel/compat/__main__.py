"""``python -m accel.compat script.py``: a script whose ``import accelerate`` is accel."""

from importlib import import_module

if __name__ == "__main__":
    import_module("accel_compat.__main__").main()
