"""Results: append-only JSON lines, statistics derived on reading, tidy frames."""
