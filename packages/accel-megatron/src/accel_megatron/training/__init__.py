"""Forward, backward and optimizer steps of megatron-core models."""
