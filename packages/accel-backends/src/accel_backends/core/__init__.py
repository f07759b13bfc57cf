"""Interface of a backend, and selection of the backend of a run."""
