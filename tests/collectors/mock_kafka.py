"""The mock broker inside librdkafka, reached through ctypes: brokers that fail on request."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

_LIBRARIES = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
PRODUCE = 0
NOT_ENOUGH_REPLICAS = 19
MESSAGE_TOO_LARGE = 10


class MockCluster:
    """One broker on a free port of this process."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle = ctypes.c_void_p(handle)
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        self.bootstrap: str = library.rd_kafka_mock_cluster_bootstraps(self._handle).decode()

    def create_topic(self, name: str, partitions: int) -> None:
        code = self._library.rd_kafka_mock_topic_create(self._handle, name.encode(), partitions, 1)
        assert code == 0

    def down(self) -> None:
        assert self._library.rd_kafka_mock_broker_set_down(self._handle, 1) == 0

    def up(self) -> None:
        assert self._library.rd_kafka_mock_broker_set_up(self._handle, 1) == 0

    def refuse_produce(self, *codes: int) -> None:
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._handle, ctypes.c_int16(PRODUCE), ctypes.c_size_t(len(codes)), array
        )


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    library = ctypes.CDLL(str(next(_LIBRARIES.glob("librdkafka-*.so*"))))
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    configuration = ctypes.c_void_p(library.rd_kafka_conf_new())
    owner = library.rd_kafka_new(0, configuration, error, ctypes.c_size_t(512))
    assert owner, error.value
    cluster = library.rd_kafka_mock_cluster_new(ctypes.c_void_p(owner), 1)
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(ctypes.c_void_p(cluster))
        library.rd_kafka_destroy(ctypes.c_void_p(owner))
