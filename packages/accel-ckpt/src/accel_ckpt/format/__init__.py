"""Format of a checkpoint: manifest, state trees, tensors and their shards."""
