"""Settings of the discovery of inference servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

PROGRAMS = (
    r"(^|/)vllm serve( |$)",
    r"-m vllm\.entrypoints\.\S*api_server",
    r"-m sglang\.launch_server|(^|/)sglang serve( |$)",
    r"(^|/)text-generation-(router|launcher)( |$)",
    r"(^|/)llama-server( |$)|-m llama_cpp\.server",
    r"(^|/)trtllm-serve( |$)",
    r"(^|/)tritonserver( |$)",
    r"(^|/)ollama serve( |$)",
    r"(^|/)lmdeploy serve api_server( |$)",
)
"""Command lines of known inference servers, arguments joined by spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Which servers of this host are found, and how they are called."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """``auto`` looks for servers when the settings name none."""
    programs: Annotated[tuple[str, ...], MinLen(1)] = PROGRAMS
    """Regular expressions, one of which the command line of a server (arguments joined by spaces)
    or of a process above it must match; the ports of other programs are never asked anything."""
    host: str = ""
    """Name or address of this machine in the names of servers that listen on all addresses; empty
    takes the machine's name where that is an address of its own, else 127.0.0.1."""
    interval_s: Annotated[float, Ge(0.5)] = 2.0
    """Time between two looks at the listening sockets."""
    grace_s: Annotated[float, Ge(0)] = 30.0
    """How long a server that does not listen any more is still watched: it may be restarting."""
    timeout_s: Annotated[float, Gt(0), Le(10)] = 1.0
    """Longest wait for an answer when a new server is asked what it is."""

    def wanted(self, engines: Sequence[str]) -> bool:
        """Whether to look for servers beside those that the settings name."""
        return self.enabled == "on" or (self.enabled == "auto" and not engines)
