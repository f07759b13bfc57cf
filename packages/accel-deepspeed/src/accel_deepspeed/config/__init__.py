"""Options of DeepSpeed, and their resolution."""
