"""``python -m latencyprism.sinks [--ready FILE] < settings``: the sink without the command line.

Standard input holds ``{"store": {...}, "kafka": {...}}`` with the fields of
:class:`~latencyprism.sinks.config.StoreConfig` and
:class:`~latencyprism.schemas.connection.KafkaConfig`.
"""

import json
import logging
import sys
from pathlib import Path

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.writer import run_sink


def main() -> None:
    """Run the sink until told to stop."""
    settings = json.load(sys.stdin)
    ready = Path(sys.argv[2]) if sys.argv[1:2] == ["--ready"] else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    def announce(text: str) -> None:
        if ready is not None:
            ready.write_text(text)

    run_sink(StoreConfig(**settings["store"]), KafkaConfig(**settings["kafka"]), ready=announce)


if __name__ == "__main__":
    main()
