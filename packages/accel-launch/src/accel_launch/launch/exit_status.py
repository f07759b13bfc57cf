"""Exit status of a preempted process, and the mark of a failed one, which launcher and training process share."""

PREEMPTED_STATUS = 75
"""The exit status of a run that was preempted and has saved (``EX_TEMPFAIL`` of sysexits.h: try again)."""

FAILED_MARK = "failed"
"""A file beside the launcher's error files: this attempt has failed, and being told to end is no preemption."""
