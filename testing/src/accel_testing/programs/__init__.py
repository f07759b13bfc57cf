"""Programs that tests start: scripts and launchers, with a time limit and a search for processes left behind."""
