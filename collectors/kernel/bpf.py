"""The edge to the kernel: bpf(2) and perf_event_open(2) through the C library's ``syscall``.

Every object is a file descriptor: closing it, or the death of this process, takes the program off
what it was attached to. Names and layouts are those of ``linux/bpf.h`` and ``linux/perf_event.h``.
"""

import ctypes
import errno
import fcntl
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from latencyprism.collectors.kernel.arch import Arch

_libc = ctypes.CDLL(None, use_errno=True)

LICENSE: Final = b"Dual BSD/GPL"
"""What the kernel is told of the programs: it gives some helpers only to such as are GPL too."""
_LOG_BYTES: Final = 1 << 18
_LOG_LINES: Final = 6
"""Lines of the verifier's log that an error quotes; the last ones say what it minds."""

NO_MEMLOCK_SINCE: Final = (5, 11)
"""From here on the memory of maps counts against the control group, not RLIMIT_MEMLOCK."""

_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT, _PROG_LOAD = range(6)
_OBJ_INFO, _RAW_TRACEPOINT_OPEN, _ENABLE_STATS = 15, 17, 32
_RAW_TP: Final = 23  # an attach type: a raw tracepoint whose arguments BTF describes
_KPROBE, _TRACING = 2, 26
_IOC_ENABLE, _IOC_SET_BPF = 0x2400, 0x40042408
_FD_CLOEXEC: Final = 8
_RUNTIME_OFFSET: Final = 192
"""Of run_time_ns, before run_cnt, in struct bpf_prog_info, which only grows at its end."""


UPROBE: Final = "bus/event_source/devices/uprobe"
"""How uprobes are opened, below the root of the sys file system."""


class MapKind(IntEnum):
    """What a map is."""

    HASH = 1
    ARRAY = 2
    PERCPU_ARRAY = 6
    LRU_HASH = 9
    RING = 27


class VerifierError(OSError):
    """The kernel did not take a program; the message ends with the verifier's last lines."""


class _MapCreate(ctypes.Structure):
    _fields_ = (
        ("map_type", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32),
        ("map_name", ctypes.c_char * 16),
    )


class _MapElement(ctypes.Structure):
    _fields_ = (
        ("map_fd", ctypes.c_uint32),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _ProgLoad(ctypes.Structure):
    _fields_ = (
        ("prog_type", ctypes.c_uint32),
        ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_void_p),
        ("license", ctypes.c_char_p),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_void_p),
        ("kern_version", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_name", ctypes.c_char * 16),
        ("prog_ifindex", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32),
        ("func_info_rec_size", ctypes.c_uint32),
        ("func_info", ctypes.c_uint64),
        ("func_info_cnt", ctypes.c_uint32),
        ("line_info_rec_size", ctypes.c_uint32),
        ("line_info", ctypes.c_uint64),
        ("line_info_cnt", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
    )


class _RawTracepoint(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("prog_fd", ctypes.c_uint32))


class _EnableStats(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint32),)


class _ObjInfo(ctypes.Structure):
    _fields_ = (
        ("bpf_fd", ctypes.c_uint32),
        ("info_len", ctypes.c_uint32),
        ("info", ctypes.c_void_p),
    )


class _PerfEvent(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("uprobe_path", ctypes.c_char_p),
        ("probe_offset", ctypes.c_uint64),
        ("rest", ctypes.c_char * 48),
    )


class Kernel:
    """System calls of this machine's kernel.

    Every method raises OSError (PermissionError without the capabilities) saying what was tried.
    """

    def __init__(self, arch: Arch, sys: str = "/sys") -> None:
        self._arch = arch
        self._uprobe = Path(sys, UPROBE)
        if kernel_version() < NO_MEMLOCK_SINCE:
            with suppress(OSError, ValueError):  # what it matters for says so itself
                _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))

    def create_map(self, kind: MapKind, name: str, *, key: int, value: int, entries: int) -> "Map":
        """A map; ``key`` and ``value`` are sizes in bytes, 0 for a ring of ``entries`` bytes."""
        attributes = _MapCreate(
            map_type=kind,
            key_size=key,
            value_size=value,
            max_entries=entries,
            map_name=name[:15].encode(),
        )
        descriptor = self.bpf(_MAP_CREATE, attributes, f"map {name}")
        # The kernel copies a value for each CPU there might be, each rounded up to 8 bytes
        copies = possible_cpus() if kind is MapKind.PERCPU_ARRAY else 1
        return Map(self, descriptor, name, key, value, copies)

    def load_tracing(self, name: str, code: bytes, tracepoint: int) -> "Program":
        """A program for the raw tracepoint of this BTF type."""
        attributes = _ProgLoad(
            prog_type=_TRACING, expected_attach_type=_RAW_TP, attach_btf_id=tracepoint
        )
        return Program(self, self._load(name, code, attributes), name)

    def load_uprobe(self, name: str, code: bytes) -> "Program":
        """A program that a function of a process calls."""
        return Program(self, self._load(name, code, _ProgLoad(prog_type=_KPROBE)), name)

    def _load(self, name: str, code: bytes, attributes: _ProgLoad) -> int:
        instructions = ctypes.create_string_buffer(code, len(code))
        attributes.insn_cnt = len(code) // 8
        attributes.insns = ctypes.addressof(instructions)
        attributes.license = LICENSE
        attributes.prog_name = name[:15].encode()
        try:
            return self.bpf(_PROG_LOAD, attributes, f"program {name}")
        except PermissionError as refused:
            if refused.errno == errno.EPERM:  # no capability; the verifier's refusal is EACCES
                raise
            error = refused.errno
        except OSError as refused:
            error = refused.errno or 0
        log = ctypes.create_string_buffer(_LOG_BYTES)
        attributes.log_level, attributes.log_size = 1, _LOG_BYTES
        attributes.log_buf = ctypes.addressof(log)
        try:
            return self.bpf(_PROG_LOAD, attributes, f"program {name}")
        except OSError as refused:
            lines = log.value.decode(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
            raise VerifierError(
                error, f"{refused.strerror}; the verifier says: {' | '.join(lines)}"
            ) from refused

    def attach_tracepoint(self, program: "Program") -> "Descriptor":
        """Run a program of :meth:`load_tracing` from now until the result is closed."""
        attributes = _RawTracepoint(prog_fd=program.descriptor)
        what = f"attaching program {program.name}"
        return Descriptor(self.bpf(_RAW_TRACEPOINT_OPEN, attributes, what))

    def attach_uprobe(
        self, program: "Program", path: str, offset: int, pid: int, *, returns: bool
    ) -> "Descriptor":
        """Run a program of :meth:`load_uprobe` whenever a thread of the process comes to this
        place of a file, or returns from the function there, until the result is closed.
        """
        kind = int((self._uprobe / "type").read_text())
        flag = (self._uprobe / "format/retprobe").read_text().rpartition(":")[2]
        event = _PerfEvent(
            type=kind,
            size=ctypes.sizeof(_PerfEvent),
            config=(1 << int(flag)) if returns else 0,
            uprobe_path=path.encode(),
            probe_offset=offset,
        )
        descriptor = _libc.syscall(
            self._arch.perf_event_open, ctypes.byref(event), pid, -1, -1, _FD_CLOEXEC
        )
        if descriptor < 0:
            raise _error(f"uprobe at {offset:#x} of {path} in process {pid}")
        attached = Descriptor(descriptor)
        try:
            fcntl.ioctl(descriptor, _IOC_SET_BPF, program.descriptor)
            fcntl.ioctl(descriptor, _IOC_ENABLE, 0)
        except BaseException:
            attached.close()
            raise
        return attached

    def count_runtime(self) -> "Descriptor":
        """Measure all programs of the machine while the result is open; costs some 30 ns a run."""
        return Descriptor(self.bpf(_ENABLE_STATS, _EnableStats(), "run time statistics"))

    def bpf(self, command: int, attributes: ctypes.Structure, what: str) -> int:
        """The system call; ``what`` goes into the error."""
        result = _libc.syscall(
            self._arch.bpf, command, ctypes.byref(attributes), ctypes.sizeof(attributes)
        )
        if result < 0:
            raise _error(what)
        return int(result)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class Descriptor:
    """An open file descriptor that is closed once."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Program(Descriptor):
    """A program the kernel has taken."""

    def __init__(self, kernel: Kernel, descriptor: int, name: str) -> None:
        super().__init__(descriptor)
        self.name = name
        self._kernel = kernel

    def runtime(self) -> tuple[int, int]:
        """Nanoseconds and runs while :meth:`Kernel.count_runtime` was on."""
        info = ctypes.create_string_buffer(256)
        attributes = _ObjInfo(
            bpf_fd=self.descriptor, info_len=len(info), info=ctypes.addressof(info)
        )
        self._kernel.bpf(_OBJ_INFO, attributes, f"statistics of program {self.name}")
        run_time_ns, run_count = struct.unpack_from("=QQ", info, _RUNTIME_OFFSET)
        return run_time_ns, run_count


class Map(Descriptor):
    """Memory that programs and this process share."""

    def __init__(
        self, kernel: Kernel, descriptor: int, name: str, key: int, value: int, copies: int
    ) -> None:
        super().__init__(descriptor)
        self.name = name
        self._kernel = kernel
        self._key = ctypes.create_string_buffer(max(key, 1))
        self._next = ctypes.create_string_buffer(max(key, 1))
        room = (value + 7) // 8 * 8 * copies if copies > 1 else value
        self._value = ctypes.create_string_buffer(max(room, 1))
        self._element = _MapElement(map_fd=descriptor)

    def get(self, key: bytes) -> bytes | None:
        """The value, for an array of each CPU all of them in a row; None when there is none."""
        self._key.raw = key
        try:
            self._call(_MAP_LOOKUP, self._key, self._value)
        except FileNotFoundError:
            return None
        return self._value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value."""
        self._key.raw = key
        self._value.raw = value
        self._call(_MAP_UPDATE, self._key, self._value)

    def delete(self, key: bytes) -> None:
        """Forget a value; one that is not there is no error."""
        self._key.raw = key
        with suppress(FileNotFoundError):
            self._call(_MAP_DELETE, self._key, None)

    def keys(self) -> Iterator[bytes]:
        """The keys of a hash; those that come or go meanwhile may be missed or seen twice."""
        at: Any = None
        while True:
            try:
                self._call(_MAP_NEXT, at, self._next)
            except FileNotFoundError:
                return
            found = self._next.raw
            yield found
            self._key.raw = found
            at = self._key

    def _call(self, command: int, key: Any, value: Any) -> None:
        self._element.key = ctypes.addressof(key) if key is not None else None
        self._element.value = ctypes.addressof(value) if value is not None else None
        self._kernel.bpf(command, self._element, f"map {self.name}")


def possible_cpus(path: str = "/sys/devices/system/cpu/possible") -> int:
    """How many CPUs the kernel keeps copies for: those that are, and those that may be added."""
    spans = [some.partition("-") for some in Path(path).read_text().strip().split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Version of the running kernel, such as (6, 18); (0, 0) when it can't be told."""
    parts = (release or os.uname().release).split(".")
    try:
        return int(parts[0]), int(parts[1].split("-")[0])
    except (IndexError, ValueError):
        return 0, 0
