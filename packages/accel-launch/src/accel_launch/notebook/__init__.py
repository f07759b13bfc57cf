"""Functions of a notebook's cells on many processes: starting them, sending the call, returning results."""
