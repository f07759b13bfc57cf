"""Interface of a backend, and the selection of one."""
