"""Order of samples: pure functions of seed, epoch and position."""
