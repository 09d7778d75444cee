"""The backends: who moves the rows; one file or package each."""
