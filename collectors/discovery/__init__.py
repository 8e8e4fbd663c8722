"""Finds the inference servers of this host."""
