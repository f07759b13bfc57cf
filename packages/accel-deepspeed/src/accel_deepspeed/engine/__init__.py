"""DeepSpeed's engines: construction, binding, optimizers."""
