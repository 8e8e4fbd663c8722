"""Addresses of inference servers, as people write them."""

from urllib.parse import SplitResult, urlsplit


def endpoint(url: str) -> SplitResult:
    """Parts of a server's base URL. Raises ValueError naming the URL and what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"engine {url!r}: expected http://host:port or https://host:port")
    try:
        parts.port  # noqa: B018 - the property checks the number
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
