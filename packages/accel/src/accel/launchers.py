"""Launchers for an interpreter, under Accelerate's import path."""

from accel_launch.notebook.launchers import debug_launcher as debug_launcher
from accel_launch.notebook.launchers import notebook_launcher as notebook_launcher
