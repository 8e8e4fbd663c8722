"""Who listens, by the tables in ``/proc/net``: slower than netlink, but they can be read for any
namespace of which a process can be seen.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
"""Address family → its table."""
LISTEN_CODE = "0A"


def listening(table: str, port: int) -> Iterator[int]:
    """Inodes of the sockets in one table that listen on a port; the kernel shows all that listen
    before all others.
    """
    try:
        with Path(table).open() as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if fields[3] != LISTEN_CODE:
                    return
                if int(fields[1].rpartition(":")[2], 16) == port:
                    yield int(fields[9])
    except OSError:
        return
