"""EP collectives between processes: shared windows on one host, messages elsewhere."""
