"""Tests of this package train on CPU ranks under ``cuda_on_cpu``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
