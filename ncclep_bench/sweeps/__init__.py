"""From scenario files to cases, and from cases to verified measurements."""
