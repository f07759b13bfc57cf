"""Map-style datasets: sharded index streams instead of a DataLoader's samplers."""
