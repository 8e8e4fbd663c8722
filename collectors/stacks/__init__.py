"""Call stacks of a server's Python processes, on demand."""
