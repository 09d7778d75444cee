"""Recorded command output into facts: one module per family of sources, each a pure function lines → facts."""
