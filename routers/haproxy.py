"""Puts commands into effect on a running HAProxy (2.4 or later) through its runtime socket.

The adapter owns weight, drain and maxconn of the servers in its mapping: what it did not set is
put back. A server in maintenance is an operator's and is left alone.
"""

import csv
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from latencyprism.routers.adapter import AdapterError
from latencyprism.routers.config import HAProxyConfig
from latencyprism.routers.lease import NORMAL, TargetState

_NAME = re.compile(r"[A-Za-z0-9_.:\-]+")
# Bits of srv_admin_state in "show servers state", HAProxy management guide 9.3.
_MAINTENANCE, _DRAIN = 0x01, 0x08
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_WEIGHT_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of the backend as HAProxy reports it."""

    weight: int
    initial_weight: int
    """As haproxy.cfg has it."""
    drained: bool
    maintenance: bool
    maxconn: int
    """0 for no limit."""


class HAProxyAdapter:
    """One backend of one HAProxy. Each call is one to three exchanges of about 1 ms on the socket.

    Raises ValueError for names that could not be spelled on the socket.
    """

    def __init__(self, config: HAProxyConfig, targets: Mapping[str, str]) -> None:
        for name in (config.backend, *targets.values()):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an HAProxy backend or server")
        self._config = config
        self._servers = dict(targets)

    def apply(self, target: str, state: TargetState) -> str:
        """Set weight, drain and maxconn and read them back. Raises AdapterError."""
        if state.rate_limit_rps is not None:
            raise AdapterError(
                "HAProxy cannot limit the rate of one server at run time; "
                "send concurrency_limit or weight"
            )
        name = self._servers[target]
        before = self._server(name, self.read())
        wanted = self._wanted(name, before, state)
        commands = self._commands(name, before, wanted)
        if commands:
            self._order(commands)
            after = self._server(name, self.read())
            if after != wanted:
                raise AdapterError(
                    f"HAProxy took {'; '.join(commands)} but reports {_words(after)}"
                )
        note = "; in maintenance, which is left as it is" if before.maintenance else ""
        return f"HAProxy {self._config.backend}/{name}: {_words(wanted)}{note}"

    def restore(self, target: str) -> str:
        """Back to the weight of haproxy.cfg, the configured maxconn and no drain."""
        return self.apply(target, NORMAL)

    def drifted(self, wanted: Mapping[str, TargetState]) -> tuple[str, ...]:
        """Targets that are not as they should be, or cannot be; :meth:`apply` says why not.

        Raises AdapterError when HAProxy cannot be asked.
        """
        servers = self.read()
        return tuple(
            target for target, state in wanted.items() if not self._holds(target, state, servers)
        )

    def read(self) -> dict[str, Server]:
        """The backend's servers by name. Raises AdapterError."""
        backend = self._config.backend
        states, _, stats = self._ask(
            f"show servers state {backend}; show stat {backend} 4 -1"
        ).partition("\n\n")
        header, rows = _table(states.splitlines()[1:], " ")
        if "srv_admin_state" not in header:
            raise AdapterError(f"HAProxy has no backend {backend}: {states.strip() or 'no answer'}")
        limits = {
            row["svname"]: int(row["slim"] or 0) for row in _table(stats.splitlines(), ",")[1]
        }
        return {
            row["srv_name"]: Server(
                weight=int(row["srv_uweight"]),
                initial_weight=int(row["srv_iweight"]),
                drained=bool(int(row["srv_admin_state"]) & _DRAIN),
                maintenance=bool(int(row["srv_admin_state"]) & _MAINTENANCE),
                maxconn=limits.get(row["srv_name"], 0),
            )
            for row in rows
        }

    def _holds(self, target: str, state: TargetState, servers: Mapping[str, Server]) -> bool:
        name = self._servers[target]
        try:
            server = self._server(name, servers)
            return server == self._wanted(name, server, state)
        except AdapterError:
            return False

    def _server(self, name: str, servers: Mapping[str, Server]) -> Server:
        server = servers.get(name)
        if server is None:
            raise AdapterError(
                f"backend {self._config.backend} has no server {name}; it has "
                f"{', '.join(servers) or 'none'}"
            )
        return server

    def _wanted(self, name: str, server: Server, state: TargetState) -> Server:
        weight = round(state.weight * server.initial_weight)
        if 0 < state.weight < 1:
            weight = max(1, weight)
            got = weight / server.initial_weight if server.initial_weight else 0.0
            if abs(got - state.weight) > _WEIGHT_ERROR:
                raise AdapterError(
                    f"weight {state.weight:g} of server {name} cannot be expressed: it has weight "
                    f"{server.initial_weight} in haproxy.cfg; give every server weight 100"
                )
        return Server(
            weight=weight,
            initial_weight=server.initial_weight,
            drained=server.drained if server.maintenance else state.drained,
            maintenance=server.maintenance,
            maxconn=self._config.maxconn
            if state.concurrency_limit is None
            else state.concurrency_limit,
        )

    def _commands(self, name: str, before: Server, wanted: Server) -> list[str]:
        path = f"{self._config.backend}/{name}"
        commands = []
        if before.weight != wanted.weight:
            commands.append(f"set weight {path} {wanted.weight}")
        if before.maxconn != wanted.maxconn:
            commands.append(f"set maxconn server {path} {wanted.maxconn}")
        if before.drained != wanted.drained:
            commands.append(f"set server {path} state {'drain' if wanted.drained else 'ready'}")
        return commands

    def _order(self, commands: Iterable[str]) -> None:
        """Give orders; HAProxy answers nothing when it obeyed."""
        answer = self._ask("; ".join(commands)).strip()
        if answer:
            raise AdapterError(f"HAProxy refused {'; '.join(commands)}: {answer}")

    def _ask(self, line: str) -> str:
        config = self._config
        answer = bytearray()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(config.timeout_s)
                connection.connect(config.socket)
                connection.sendall(line.encode() + b"\n")
                while data := connection.recv(65536):
                    answer += data
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise AdapterError(f"HAProxy answers {line!r} without end")
        except OSError as error:
            raise AdapterError(
                f"no answer on HAProxy's socket {config.socket}: {error}; is it running, with "
                "'stats socket ... level admin' and readable by this user?"
            ) from error
        text = answer.decode(errors="replace")
        if "Permission denied" in text:
            raise AdapterError(
                f"HAProxy's socket {config.socket} does not allow {line!r}; declare it with "
                "'level admin'"
            )
        return text


def _table(lines: Iterable[str], delimiter: str) -> tuple[list[str], list[dict[str, str]]]:
    """Rows under a header that begins with ``# ``."""
    rows = [line.removeprefix("# ") for line in lines if line]
    reader = csv.DictReader(rows, delimiter=delimiter)
    return list(reader.fieldnames or ()), list(reader)


def _words(server: Server) -> str:
    parts = [f"weight {server.weight} of {server.initial_weight}"]
    parts.append(f"maxconn {server.maxconn}" if server.maxconn else "no maxconn")
    if server.drained:
        parts.append("drained")
    return ", ".join(parts)
