"""The rows of the table of settings, a file for each subject; ``accel.config.model`` puts them together."""
