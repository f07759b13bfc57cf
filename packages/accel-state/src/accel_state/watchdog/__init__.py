"""The hang doctor: the operation and line of each rank, when ranks wait for one that will not come."""
