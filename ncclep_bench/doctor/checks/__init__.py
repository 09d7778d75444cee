"""One file per family of checks; each ends in its table CHECKS."""
