import pytest

from latencyprism.collectors.address import instance_of, port_of


@pytest.mark.parametrize(
    ("url", "instance"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://engine/base/", "engine:80"),
        ("https://engine", "engine:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_instance_of_a_url(url: str, instance: str) -> None:
    assert instance_of(url) == instance


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h:1", "http://", "http://h:port"])
def test_wrong_url_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="engine "):
        instance_of(url)


def test_port_of_a_url() -> None:
    assert [port_of(url) for url in ("http://h:8000", "http://h", "https://h")] == [8000, 80, 443]
