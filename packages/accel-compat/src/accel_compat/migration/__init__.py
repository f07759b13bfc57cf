"""Static checks of scripts that are written for Accelerate: names to rename, and calls that mean something else."""
