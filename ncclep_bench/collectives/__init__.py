"""The collectives: what each moves, what is right, how many bytes, how exact; one file each."""
