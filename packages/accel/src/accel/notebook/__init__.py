"""Functions of a notebook's cells on many processes: where they run, how they get there, what comes back."""
