"""Benches that print the figures the project is judged by."""
