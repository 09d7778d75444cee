"""Self-tests: what the machine must be able to do, tried out with real ranks."""
