"""Families of models: how megatron-core's model of each is built, called, and gives its loss."""
