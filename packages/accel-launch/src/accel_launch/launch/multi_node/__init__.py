"""Launches on several nodes that find each other at a rendezvous."""
