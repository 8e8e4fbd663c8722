"""What differs between processor architectures: numbers of system calls, places of registers.

Tested on x86_64; aarch64 follows the kernel's headers and has not been run.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.source import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture.

    ``user_args`` and ``user_return`` are offsets in ``bpf_user_pt_regs_t``, which a uprobe is
    given: the kernel's ABI fixes them. What a system call's tracepoint is given is laid out as the
    kernel likes; ``call_number`` and ``call_args`` name its fields, a member of ``struct pt_regs``
    and an index into it where that is an array, to be looked up in BTF.
    """

    name: str
    bpf: int
    perf_event_open: int
    calls: Mapping[str, int]
    """System calls that are probed, by name; architectures lack some."""
    user_args: tuple[int, int, int]
    user_return: int
    call_number: str
    call_args: tuple[tuple[str, int], tuple[str, int]]
    """First and second argument as they stand when the call returns."""


X86_64: Final = Arch(
    name="x86_64",
    bpf=321,
    perf_event_open=298,
    calls={
        "read": 0,
        "write": 1,
        "close": 3,
        "readv": 19,
        "writev": 20,
        "sendfile": 40,
        "accept": 43,
        "sendto": 44,
        "recvfrom": 45,
        "sendmsg": 46,
        "recvmsg": 47,
        "accept4": 288,
    },
    user_args=(112, 104, 96),  # rdi, rsi, rdx
    user_return=80,  # rax
    call_number="orig_ax",
    call_args=(("di", 0), ("si", 0)),
)
AARCH64: Final = Arch(
    name="aarch64",
    bpf=280,
    perf_event_open=241,
    calls={
        "close": 57,
        "read": 63,
        "write": 64,
        "readv": 65,
        "writev": 66,
        "sendfile": 71,
        "accept": 202,
        "sendto": 206,
        "recvfrom": 207,
        "sendmsg": 211,
        "recvmsg": 212,
        "accept4": 242,
    },
    user_args=(0, 8, 16),  # x0, x1, x2
    user_return=0,  # x0
    call_number="syscallno",
    call_args=(("orig_x0", 0), ("regs", 1)),  # the result has taken the place of x0
)
ARCHES: Final = {arch.name: arch for arch in (X86_64, AARCH64)}


def this_arch() -> Arch:
    """The architecture of this machine. Raises UnavailableError when it is none of those known."""
    found = ARCHES.get(platform.machine())
    if found is None:
        raise UnavailableError(
            f"kernel probes know {' and '.join(ARCHES)}, this machine is {platform.machine()}"
        )
    return found
