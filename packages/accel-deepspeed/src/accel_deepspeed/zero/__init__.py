"""ZeRO: gradients, partitions and gathered parameters of each stage."""
