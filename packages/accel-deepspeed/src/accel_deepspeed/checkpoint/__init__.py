"""States of engines, and DeepSpeed checkpoint folders."""
