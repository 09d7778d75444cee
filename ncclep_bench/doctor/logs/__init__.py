"""Logs of jobs and machines: signatures of known faults, found in one streaming pass."""
