"""The parts of the Accelerator's interface, one file each."""
