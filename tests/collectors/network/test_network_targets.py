import ipaddress

import pytest

from latencyprism.collectors.network.targets import MAX_ADDRESSES, Targets, Watch


def packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "http://127.0.0.1:8000",
            Watch(instance="127.0.0.1:8000", port=8000, addresses=("127.0.0.1",)),
        ),
        ("http://[::1]:8000/v1", Watch(instance="[::1]:8000", port=8000, addresses=("::1",))),
        ("http://0.0.0.0:8000", Watch(instance="0.0.0.0:8000", port=8000)),
        ("https://10.0.0.1", Watch(instance="10.0.0.1:443", port=443, addresses=("10.0.0.1",))),
    ],
)
def test_watch_of_a_url(url: str, expected: Watch) -> None:
    assert Watch.of(url) == expected


def test_a_name_is_resolved_and_kept_as_the_instance() -> None:
    watch = Watch.of("http://localhost:8000")

    assert watch.instance == "localhost:8000"
    assert watch.addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in watch.addresses)


def test_a_name_with_several_addresses_is_known_by_each() -> None:
    watch = Watch(instance="engine:8000", port=8000, addresses=("10.0.0.6", "2001:db8::6"))
    targets = Targets([watch], local=lambda _: False)

    assert targets.find(packed("10.0.0.6"), 8000) == "engine:8000"
    assert targets.find(packed("2001:db8::6"), 8000) == "engine:8000"
    assert targets.find(packed("10.0.0.7"), 8000) is None


def test_one_address_of_this_host_among_several_stands_for_all() -> None:
    watch = Watch(instance="engine:8000", port=8000, addresses=("10.0.0.6", "127.0.0.1"))
    targets = Targets([watch], local=lambda a: a in ("127.0.0.1", "10.0.0.5"))

    assert targets.find(packed("10.0.0.5"), 8000) == "engine:8000"


def test_an_old_address_in_the_clothes_of_a_new_one() -> None:
    watch = Watch.of("http://[::ffff:10.0.0.6]:8000")

    assert watch.addresses == ("10.0.0.6",)


def test_other_servers_can_be_assigned() -> None:
    targets = Targets([Watch.of("http://10.0.0.6:8000")], local=lambda _: False)
    assert targets.find(packed("10.0.0.7"), 8000) is None

    targets.assign([Watch.of("http://10.0.0.7:9000")])

    assert targets.find(packed("10.0.0.6"), 8000) is None
    assert targets.find(packed("10.0.0.7"), 9000) == "10.0.0.7:9000"
    assert (targets.ports, targets.instances) == ({9000}, ["10.0.0.7:9000"])


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://a:1", "http://:80", "http://a:x"])
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://host:port|[Pp]ort"):
        Watch.of(url)


def test_every_address_of_this_host_reaches_a_local_server() -> None:
    here = {"127.0.0.1", "10.0.0.5"}
    targets = Targets([Watch.of("http://127.0.0.1:8000")], local=lambda a: a in here)

    assert targets.find(packed("10.0.0.5"), 8000) == "127.0.0.1:8000"
    assert targets.find(packed("127.0.0.1"), 8000) == "127.0.0.1:8000"
    assert targets.find(packed("10.0.0.6"), 8000) is None  # somebody else's server
    assert targets.find(packed("127.0.0.1"), 8001) is None


def test_a_server_elsewhere_is_found_by_its_address_alone() -> None:
    targets = Targets([Watch.of("http://10.0.0.6:8000")], local=lambda a: a == "127.0.0.1")

    assert targets.find(packed("10.0.0.6"), 8000) == "10.0.0.6:8000"
    assert targets.find(packed("127.0.0.1"), 8000) is None


def test_two_local_servers_on_one_port_are_told_apart_by_address_only() -> None:
    watches = [Watch.of("http://127.0.0.1:8000"), Watch.of("http://127.0.0.2:8000")]
    targets = Targets(watches, local=lambda _: True)

    assert targets.find(packed("127.0.0.2"), 8000) == "127.0.0.2:8000"
    assert targets.find(packed("127.0.0.1"), 8000) == "127.0.0.1:8000"
    assert targets.find(packed("10.0.0.5"), 8000) is None


def test_the_kernel_is_asked_once_an_address_within_bounds() -> None:
    asked: list[str] = []

    def local(address: str) -> bool:
        asked.append(address)
        return True

    targets = Targets([Watch(instance="i:8000", port=8000)], local=local)
    for _ in range(3):
        targets.find(packed("10.0.0.5"), 8000)
    assert asked == ["10.0.0.5"]

    for number in range(2 * MAX_ADDRESSES):
        targets.find(number.to_bytes(4, "big"), 8000)
    assert len(targets._known) <= MAX_ADDRESSES
