"""Watches accelerators: clocks, throttling, memory, temperature, power, errors and bus traffic."""
