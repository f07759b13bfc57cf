"""Exit status of a preempted process, and marker file of a failed attempt, shared by launcher and training process."""

PREEMPTED_STATUS = 75
"""Exit status of a run that was preempted and has saved (``EX_TEMPFAIL`` of sysexits.h: try again)."""

FAILED_MARK = "failed"
"""File beside the launcher's error files: the attempt has failed, so SIGTERM is not a preemption."""
