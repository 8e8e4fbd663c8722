"""Counters that the operating system keeps for an inference server and its machine."""
