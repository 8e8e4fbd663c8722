import socket

import pytest

from latencyprism.collectors.address import addresses_of, instance_of, is_local, port_of


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


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://h:1",
        "http://",
        "http://h:port",
        "http://10.0.0.1 :8000",
        "http://a\0b:80",
        "http://a..b:80",
        f"http://{'h' * 64}:80",
    ],
)
def test_wrong_url_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="engine "):
        instance_of(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="'h': its URL holds credentials") as refused:
        instance_of("http://user:hunter2@h:8000")

    assert "hunter2" not in str(refused.value)


def test_port_of_a_url() -> None:
    assert [port_of(url) for url in ("http://h:8000", "http://h", "https://h")] == [8000, 80, 443]


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1",)),
        ("http://[2001:db8::1]:8000", ("2001:db8::1",)),
        ("http://[::ffff:10.0.0.6]:8000", ("10.0.0.6",)),
        ("http://0.0.0.0:8000", ()),
        ("http://[::]:8000", ()),
    ],
)
def test_addresses_of_a_url(url: str, addresses: tuple[str, ...]) -> None:
    assert addresses_of(url) == addresses


def test_a_name_may_have_several_addresses_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["10.0.0.6", "2001:db8::6", "10.0.0.6"]

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "engine"
        return [(None, None, 6, "", (address, 0)) for address in answers]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    assert addresses_of("http://engine:8000") == ("10.0.0.6", "2001:db8::6")


def test_a_name_that_does_not_resolve_is_told_with_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    with pytest.raises(OSError, match=r"http://engine:8000.*not known"):
        addresses_of("http://engine:8000")


def test_local_addresses_are_known_to_the_kernel() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # reserved for documentation
    assert not is_local("nonsense")
