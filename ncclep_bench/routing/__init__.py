"""Which experts every token goes to: synthetic laws, measured loads, recorded traces."""
