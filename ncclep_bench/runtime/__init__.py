"""The gates to what is outside: MPI, shared memory, devices; each foreign library is imported in one file only."""
