"""Map-style datasets: sharded index streams in place of the samplers of a DataLoader."""
