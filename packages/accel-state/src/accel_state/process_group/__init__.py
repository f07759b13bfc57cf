"""Process group of a run: rendezvous, opening and closing."""
