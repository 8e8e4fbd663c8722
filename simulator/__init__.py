"""Simulated inference servers, load and faults with known truth."""
