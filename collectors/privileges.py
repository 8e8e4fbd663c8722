"""Gives up what a privileged start allowed, except the capabilities that the sources go on to need.

Linux only. Capabilities belong to threads, so :func:`drop` must be called before there are others:
whatever is started afterwards has what the calling thread has.
"""

import ctypes
import os
import pwd
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from latencyprism.collectors.config import Capability, CollectorConfig, SourceName

BITS: Mapping[Capability, int] = MappingProxyType(
    {
        "CAP_DAC_READ_SEARCH": 2,
        "CAP_NET_ADMIN": 12,
        "CAP_NET_RAW": 13,
        "CAP_SYS_PTRACE": 19,
        "CAP_SYS_ADMIN": 21,
        "CAP_PERFMON": 38,
        "CAP_BPF": 39,
    }
)
"""Bits of the capability sets, from linux/capability.h."""
NEEDED: Mapping[SourceName, tuple[Capability, ...]] = MappingProxyType(
    {
        # Rings are opened again after a failure and after a change of the settings.
        "network": ("CAP_NET_RAW",),
        # /proc/PID/fd of other users: the folder asks for the first, each link in it for the other.
        "host": ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"),
        "xpu": ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"),
        "kernel": ("CAP_BPF", "CAP_PERFMON", "CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE"),
        "stacks": ("CAP_SYS_PTRACE",),
    }
)
"""What a source uses while it runs, where that is anything."""
DISCOVERY_NEEDS: tuple[Capability, ...] = ("CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE")
NAMESPACES_NEED: tuple[Capability, ...] = ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE")
"""To enter other network namespaces, which come and go with containers."""

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
VERSION_3 = 0x20080522
"""Of the capability structures: 64 bits a set, from linux/capability.h."""


class PrivilegesError(RuntimeError):
    """Privileges that could not be given up; going on with them would not be what was asked for."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _Sets(ctypes.Structure):
    _fields_ = (("low", _Half), ("high", _Half))


_libc = ctypes.CDLL(None, use_errno=True)


def permitted() -> set[Capability]:
    """Those of :data:`BITS` that the calling thread may use."""
    sets = _Sets()
    _check("capget", _libc.capget(ctypes.byref(_Header(VERSION_3, 0)), ctypes.byref(sets)))
    mask = sets.low.permitted | sets.high.permitted << 32
    return {name for name, bit in BITS.items() if mask >> bit & 1}


def needed(config: CollectorConfig) -> set[Capability]:
    """Capabilities that what these settings enable uses while it runs."""
    found = {capability for source in config.sources for capability in NEEDED.get(source, ())}
    if config.discovery.wanted(config.engines):
        found.update(DISCOVERY_NEEDS)
    if "network" in config.sources and config.network.namespaces:
        found.update(NAMESPACES_NEED)
    return found


def drop(user: str, *, keep: Iterable[Capability], inherit: Iterable[Capability] = ()) -> None:
    """Become ``user`` (a name or a number) for good, with no capabilities but ``keep``.

    Those of ``keep`` that this process does not have are passed over. ``inherit`` are kept by
    programs that it starts, too. No program can gain any privilege afterwards (no_new_privs). What
    signal this process gets when its parent ends stays as it is.
    Raises :class:`PrivilegesError` when there is no such user, when other threads already run,
    or when the kernel refuses a step; the process should end then.
    """
    uid, gid, groups = _user(user)
    if uid == 0:
        raise PrivilegesError(f"user {user!r} is root, so nothing would be given up")
    threads = [path.name for path in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        raise PrivilegesError(f"{len(threads)} threads run, and each would keep its capabilities")
    kept = permitted() & set(keep)
    death_signal = ctypes.c_int()
    try:
        _prctl(PR_GET_PDEATHSIG, ctypes.addressof(death_signal))
        _prctl(PR_SET_KEEPCAPS, 1)
        if os.geteuid() == 0:
            os.setgroups(groups)
        if os.getresuid() != (uid, uid, uid):
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        _capset(kept, inheritable=kept & set(inherit))
        for name in kept & set(inherit):
            _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, BITS[name])
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        # Both are lost with the user: /proc/self belonged to root now, and the parent could leave
        # this process behind.
        _prctl(PR_SET_DUMPABLE, 1)
        _prctl(PR_SET_PDEATHSIG, death_signal.value)
    except OSError as error:
        raise PrivilegesError(f"could not become {user!r}: {error}") from error


def _user(user: str) -> tuple[int, int, list[int]]:
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError as error:
        if user.isdigit():  # as in a container without a file of users
            return int(user), int(user), []
        raise PrivilegesError(f"there is no user {user!r} on this machine") from error
    return entry.pw_uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)


def _capset(kept: Iterable[Capability], *, inheritable: Iterable[Capability]) -> None:
    mask = sum(1 << BITS[name] for name in kept)
    passed = sum(1 << BITS[name] for name in inheritable)
    low, high = (
        _Half(mask >> shift & 0xFFFFFFFF, mask >> shift & 0xFFFFFFFF, passed >> shift & 0xFFFFFFFF)
        for shift in (0, 32)
    )
    _check(
        "capset", _libc.capset(ctypes.byref(_Header(VERSION_3, 0)), ctypes.byref(_Sets(low, high)))
    )


def _prctl(option: int, *arguments: int) -> None:
    values = (*arguments, 0, 0, 0, 0)[:4]
    _check(f"prctl {option}", _libc.prctl(option, *(ctypes.c_ulong(value) for value in values)))


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
