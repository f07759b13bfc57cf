"""Cost models: memory and communication of each strategy."""
