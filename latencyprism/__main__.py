"""``python -m latencyprism``."""

from latencyprism.cli import main

main()
