"""Reaching ClickHouse: a server by its URL, or the store process of a folder."""

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError, DatabaseError

from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import (
    AUTH_CODES,
    ROW_CODES,
    RowsRefusedError,
    StoreAuthError,
    StoreAwayError,
    StoreError,
    StoreVersionError,
)
from latencyprism.sinks.store.lock import find_endpoint

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

OLDEST = "24.10"
"""First ClickHouse whose refreshable materialized views may append."""


_WRAPPING = re.compile(
    r"^Received ClickHouse exception, code: \d+, server response: |\s*\(for url [^)]*\)\s*$"
)
QUERY_CODES = frozenset({46, 47, 60, 62, 115})
"""Unknown function, identifier, table; syntax error; unknown setting."""


def connect(config: StoreConfig) -> "Client":
    """A client of the configured store, with its database chosen whether it exists yet or not.

    Blocks for at most ``connect_timeout_s`` and one query. The client may be used by one thread
    at a time. Raises :class:`StoreAwayError`, :class:`StoreAuthError`,
    :class:`StoreVersionError`, and ValueError for an address that is none.
    """
    url = address(config)
    try:
        client = clickhouse_connect.get_client(
            dsn=url,
            username=config.username,
            password=config.password,
            verify=config.verify_tls,
            ca_cert=config.tls_ca or None,
            connect_timeout=config.connect_timeout_s,
            send_receive_timeout=config.request_timeout_s,
            query_retries=0,
            autogenerate_session_id=False,
        )
    except ClickHouseError as e:
        raise _greeting_failed(e, url) from e
    version = client.server_version or "of no version"
    if not _is_new_enough(version):
        client.close()
        raise StoreVersionError(
            f"the store at {url} is ClickHouse {version}: {OLDEST} or newer is needed"
        )
    client.database = config.database
    return client


def address(config: StoreConfig) -> str:
    """URL of the configured store.

    Raises :class:`StoreAwayError` when no process serves the folder, ValueError for a URL that
    is none.
    """
    if config.url:
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"store.url {config.url!r}: give it as http://host:8123")
        return config.url
    if not config.directory:
        raise ValueError("neither store.url nor store.directory is set: there is no store to reach")
    endpoint = find_endpoint(Path(config.directory))
    if endpoint is None:
        raise StoreAwayError(
            f"no store process serves {config.directory}: start one with "
            f"`python -m latencyprism.sinks.store --directory {config.directory}`"
        )
    return endpoint.url


def explained(error: ClickHouseError, url: str) -> StoreError:
    """What a driver's exception means for the caller, in words."""
    code = getattr(error, "code", None)
    text = str(error)
    if code in AUTH_CODES:
        return StoreAuthError(
            f"the store at {url} refuses the user or password (store.username, store.password): "
            f"{_first_line(text)}",
            code=code,
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StoreAuthError(
            f"the certificate of the store at {url} is not trusted (store.tls_ca names the "
            f"authority that signed it): {_first_line(text)}"
        )
    if code in ROW_CODES:
        return RowsRefusedError(_first_line(text), code=code)
    if isinstance(error, DatabaseError) and code is not None:
        return StoreAwayError(
            f"the store at {url} cannot do it now: {_first_line(text)}", code=code
        )
    if isinstance(error, DatabaseError) and "HTTP status" in text:
        return StoreVersionError(f"what answers at {url} is no ClickHouse: {_first_line(text)}")
    return StoreAwayError(f"the store at {url} does not answer: {_first_line(text)}", code=code)


def _greeting_failed(error: ClickHouseError, url: str) -> StoreError:
    """The same for the first exchange, in which an old or foreign server does not play along."""
    text = str(error)
    if getattr(error, "code", None) in QUERY_CODES:
        return StoreVersionError(
            f"the store at {url} does not understand the client; ClickHouse {OLDEST} "
            f"or newer is needed: {_first_line(text)}"
        )
    if text.startswith("Unexpected response"):
        return StoreVersionError(f"what answers at {url} is no ClickHouse: {_first_line(text)}")
    return explained(error, url)


def _is_new_enough(version: str) -> bool:
    try:
        return _release(version) >= _release(OLDEST)
    except ValueError:
        return False


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _first_line(text: str) -> str:
    """The driver's text without what it adds around the store's own words."""
    lines = _WRAPPING.sub("", text).strip().splitlines()
    return lines[0][:500] if lines else "no reason was given"
