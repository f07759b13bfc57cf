"""State dicts of engines, and import of DeepSpeed checkpoint folders."""
