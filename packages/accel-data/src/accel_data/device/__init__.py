"""Transfer of batches to the device of the step."""
