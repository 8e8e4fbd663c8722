"""``python -m latencyprism.sinks.store --directory D --port P``."""

import argparse
import logging
import os
import sys
from pathlib import Path

from latencyprism.sinks.store import DirectoryTakenError, serve_store


def main() -> int:
    """Serve a folder until told to stop; 1 when it cannot be served, with the reason."""
    parser = argparse.ArgumentParser(prog="latencyprism.sinks.store", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="folder of the store")
    parser.add_argument("--port", type=int, default=0, help="loopback port; 0 takes a free one")
    parser.add_argument("--ready", type=Path, help="file that gets the port once it answers")
    parser.add_argument("--username", default="default")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    def ready(port: int) -> None:
        if arguments.ready is None:
            sys.stdout.write(f"{port}\n")
            sys.stdout.flush()
            return
        draft = arguments.ready.with_name(arguments.ready.name + ".draft")
        draft.write_text(str(port))
        draft.replace(arguments.ready)

    try:
        serve_store(
            arguments.directory,
            port=arguments.port,
            username=arguments.username,
            password=os.environ.get("LATENCYPRISM_STORE_PASSWORD", ""),
            ready=ready,
        )
    except (DirectoryTakenError, OSError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
