"""The hang doctor: who is where in which operation, when ranks wait for one that will not come."""
