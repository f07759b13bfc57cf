"""The rows of the table of settings, a file for each subject; ``accel_launch.config.model`` puts them together."""
