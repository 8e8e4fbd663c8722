"""Addresses of inference servers, as people write them."""

import errno
import re
import socket
from ipaddress import IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

_NO_HOST = re.compile(r"[\s\x00-\x1f\x7f]")


def in_use_advice(error: OSError, *, find: str, setting: str) -> str:
    """What to do about an address that another has, to put behind the error; else nothing."""
    if error.errno != errno.EADDRINUSE:
        return ""
    return f" (`{find}` tells who has it; {setting} sets another)"


def endpoint(url: str) -> SplitResult:
    """Parts of a server's base URL. Raises ValueError naming the URL and what is wrong."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.username is not None or parts.password is not None:
        # Not shown: it would stand in logs.
        raise ValueError(
            f"engine at {host!r}: its URL holds credentials, which would be published with its "
            "name; set collectors.engine.token_file"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"engine {url!r}: expected http://host:port or https://host:port")
    if _NO_HOST.search(host):
        raise ValueError(f"engine {url!r}: {host!r} is no host")
    try:
        parts.port  # noqa: B018 - the property checks the number
        host.encode("idna")  # the resolver does, and raises the same much later
    except ValueError as error:
        raise ValueError(f"engine {url!r}: {error}") from error
    return parts


def port_of(url: str) -> int:
    """Port of a server's base URL. Raises ValueError as :func:`endpoint` does."""
    parts = endpoint(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def instance_of(url: str) -> str:
    """``host:port`` of a server's base URL, by which all its telemetry is keyed.

    Raises ValueError as :func:`endpoint` does.
    """
    host = str(endpoint(url).hostname)
    return f"[{host}]:{port_of(url)}" if ":" in host else f"{host}:{port_of(url)}"


def addresses_of(url: str) -> tuple[str, ...]:
    """IP addresses of the server of a base URL; none for a wildcard such as 0.0.0.0, which stands
    for every address of this host.

    A host name is resolved, which may block, and may have several. Raises ValueError as
    :func:`endpoint` does, OSError naming the URL for a name that does not resolve.
    """
    host = str(endpoint(url).hostname)
    try:
        found = [ip_address(host)]
    except ValueError:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(error.errno, f"engine {url!r}: {error.strerror}") from error
        found = [ip_address(address[0]) for *_, address in answers]
    plain = [(isinstance(a, IPv6Address) and a.ipv4_mapped) or a for a in found]
    if any(address.is_unspecified for address in plain):
        return ()
    return tuple(dict.fromkeys(map(str, plain)))


def is_local(address: str) -> bool:
    """Whether an IP address is one of this host's, in the network namespace of the calling thread,
    by asking the kernel to bind it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
