"""Restarts a process with the hash seed of its run, before any other module is imported."""

import os
import sys

if (_run := os.environ.get("ACCEL_TESTING_HASH_SEED")) is not None:
    _wanted = str((int(_run) + 1 + int(os.environ.get("RANK", "-1"))) % 2**32)
    if os.environ.get("PYTHONHASHSEED") != _wanted:
        os.environ["PYTHONHASHSEED"] = _wanted
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
