"""Judging windows: what is workload, what is a fault, and what speaks for which cause."""
