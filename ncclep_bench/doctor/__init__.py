"""The doctor: collect facts of machine and job, judge them by pure checks, say what to do."""
