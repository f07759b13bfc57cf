"""ZeRO stages 0 to 3: accumulated gradients, partitions and gathered parameters."""
