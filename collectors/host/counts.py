"""What the host source met since its start."""

KINDS = (
    "samples",
    "missed_ticks",
    "unreadable_servers",
    "ambiguous_servers",
    "ambiguous_ray_workers",
    "processes_beyond_bound",
    "threads_beyond_bound",
    "unreadable_namespaces",
    "sockets_beyond_bound",
    "netlink_errors",
    "netlink_truncated",
    "netlink_unexpected",
    "netlink_stale",
    "netlink_interrupted",
    "netlink_attributes",
)
"""All kinds that are counted; the README tells what each means."""


class Counts(dict[str, int]):
    """A number for each of ``KINDS``; all are there from the start, so that another thread may copy
    it at any time.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(KINDS, 0))
