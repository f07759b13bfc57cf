"""The Accelerator's sides, one file each: what it says of the process, the data, the checkpoints."""
