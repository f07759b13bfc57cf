"""Launches through SSH, MPI, Slurm and TPU pods."""
