"""A broker from a PyPI wheel, for a machine without Java; its limits are stated, not hidden."""

import importlib.util
from pathlib import Path

from latencyprism.local.broker import HOST, LocalBroker, UnavailableError


class FallbackBroker(LocalBroker):
    """noida-db's Kafka service (extra ``broker``): a native program that keeps its data on disk."""

    product = "noida-db"
    limits = (
        "a worker killed with SIGKILL is never evicted and blocks its consumer group until the "
        "broker is started again",
        "messages of the last seconds are lost when the broker itself is killed",
    )

    def _command(self, port: int, directory: Path) -> list[str]:
        package = importlib.util.find_spec("noida_db")
        if package is None or package.origin is None:
            raise UnavailableError(
                "the broker for machines without Java is not installed either "
                "(pip install 'latencyprism[broker]')"
            )
        return [
            str(Path(package.origin).with_name("noida-db")),
            *("start", "--data-dir", str(directory / "noida"), "--host", HOST),
            *("--only", "kafka", "--kafka-port", str(port)),
        ]
