"""Rows of the settings table, one module for each subject; ``accel_launch.config.model`` combines them."""
