"""The programs that the kernel runs: what each tier looks at, and what it keeps of it.

Every program ends at once for processes that are not watched. The programs of this module are
offered under GPL-2.0 too, besides the licence of the project: the kernel asks for that.

Registers by custom: R6 to R9 hold what a program needs beyond a call, R0 to R5 come and go. Places
on the stack are named by their distance from the frame pointer.
"""

from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.kernel.arch import Arch
from latencyprism.collectors.kernel.assembler import Alu, Assembler, Cond, Helper, Reg, Size
from latencyprism.collectors.kernel.btf import Btf
from latencyprism.collectors.kernel.histogram import BUCKETS, FIRST_BITS

R0, R1, R2, R3, R4, R5 = Reg.R0, Reg.R1, Reg.R2, Reg.R3, Reg.R4, Reg.R5
R6, R7, R8, R9, FP = Reg.R6, Reg.R7, Reg.R8, Reg.R9, Reg.FP
U32, U64 = Size.U32, Size.U64

SLOT: Final = -8
"""Stack: which histogram, an index into the array of histograms."""
KEY: Final = -16
"""Stack: key of a map, up to 8 bytes."""
VALUE: Final = -24
"""Stack: value of a map, up to 8 bytes."""
SPARE: Final = -32
PROCESS: Final = -40
OUT: Final = "out"
_NO_WAKEUP: Final = 1  # BPF_RB_NO_WAKEUP: the reader looks by itself

EVENT_HEADER: Final = 32
"""Of an event of :func:`frames`: time (u64), process, descriptor, bytes moved, direction (u32), and
events lost before it (u64)."""
INBOUND, OUTBOUND = 0, 1
INBOUND_BYTES: Final = 256
"""What is read of messages to the engine: enough for the kind, the request's id and the prompt's
length of the first, and for some that only give up requests."""
LEAST_BYTES: Final = 8
"""Messages up to here only wake a thread; what is longer than this is looked at."""
SCRATCH_BYTES: Final = 1 << 15
"""Largest event; the kernel allows no larger value for each CPU."""

CONNECTION_BYTES: Final = 24
"""A connection: when the request was read, when it was last written to (ns, u64 each), writes
since the request, and its first histogram (u32 each)."""
ASKED, WROTE, WRITES, FIRST = 0, 8, 16, 20

TLS_BYTES: Final = 24
"""A TLS session: when the request was read, when an event was last written (ns, u64 each), and
whether an answer began (u32)."""
LAST_EVENT, STATE = 8, 16
_ASKED, _BEGUN, _STREAMS = 0, 1, 2
PREFIX_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLayout:
    """Where the scheduler's tracepoints and tasks keep what is needed."""

    switch: int
    wakeup: int
    wakeup_new: int
    """Numbers of the tracepoints' types."""
    woken: int
    previous: int
    following: int
    """Arguments that are tasks."""
    pid: int
    tgid: int
    state: int

    @classmethod
    def of(cls, btf: Btf) -> "SwitchLayout":
        """From the running kernel. Raises BtfError naming what it lacks."""
        switch = btf.tracepoint("sched_switch")
        wakeup = btf.tracepoint("sched_wakeup")
        return cls(
            switch=switch.number,
            wakeup=wakeup.number,
            wakeup_new=btf.tracepoint("sched_wakeup_new").number,
            woken=wakeup.argument("task_struct"),
            previous=switch.argument("task_struct"),
            following=switch.argument("task_struct", 1),
            pid=btf.offset("task_struct", "pid"),
            tgid=btf.offset("task_struct", "tgid"),
            state=btf.offset("task_struct", "__state", "state"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """Where the tracepoint of finished system calls keeps what is needed."""

    exit: int
    registers: int
    result: int
    """Arguments."""
    number: int
    first: int
    second: int

    @classmethod
    def of(cls, btf: Btf, arch: Arch) -> "CallLayout":
        """From the running kernel. Raises BtfError naming what it lacks."""
        finished = btf.tracepoint("sys_exit")
        registers = finished.argument("pt_regs")
        (first, first_index), (second, second_index) = arch.call_args
        return cls(
            exit=finished.number,
            registers=registers,
            result=registers + 1,
            number=btf.offset("pt_regs", arch.call_number),
            first=btf.offset("pt_regs", first, index=first_index),
            second=btf.offset("pt_regs", second, index=second_index),
        )


def _lookup(a: Assembler, map_fd: int, key: int = KEY) -> None:
    """R0 points to the value of the key on the stack; without one the program ends."""
    _find(a, map_fd, key)
    a.jump_if(R0, Cond.EQ, 0, OUT)


def _find(a: Assembler, map_fd: int, key: int = KEY) -> None:
    """R0 points to the value of the key on the stack, or is 0."""
    a.load_map(R1, map_fd)
    a.move(R2, FP)
    a.alu(Alu.ADD, R2, key)
    a.call(Helper.MAP_LOOKUP)


def _put(a: Assembler, map_fd: int, key: int = KEY, value: int = VALUE) -> None:
    """Set the value of the key on the stack to what is on the stack."""
    a.load_map(R1, map_fd)
    a.move(R2, FP)
    a.alu(Alu.ADD, R2, key)
    a.move(R3, FP)
    a.alu(Alu.ADD, R3, value)
    a.move(R4, 0)
    a.call(Helper.MAP_UPDATE)


def _delete(a: Assembler, map_fd: int, key: int = KEY) -> None:
    a.load_map(R1, map_fd)
    a.move(R2, FP)
    a.alu(Alu.ADD, R2, key)
    a.call(Helper.MAP_DELETE)


def _only(a: Assembler, map_fd: int) -> None:
    """R0 points to the only element of an array."""
    a.store(U32, FP, SPARE, 0)
    _lookup(a, map_fd, SPARE)


def _current_process(a: Assembler, register: Reg) -> None:
    a.call(Helper.GET_CURRENT_PID_TGID)
    a.move(register, R0)
    a.alu(Alu.RSH, register, 32)


def _observe(a: Assembler, times_fd: int, nanoseconds: Reg) -> None:
    """Book a time, in R6 to R9, into the histogram whose index is at SLOT."""
    done = a.unique("bucket")
    a.store(U32, FP, SLOT + 4, 0)
    _lookup(a, times_fd, SLOT)
    a.atomic_add(R0, 8 * BUCKETS, nanoseconds)
    a.move(R1, nanoseconds)
    a.alu(Alu.RSH, R1, FIRST_BITS)
    a.move(R2, 0)
    a.jump_if(R1, Cond.EQ, 0, done)
    a.move(R2, BUCKETS - 1)
    a.jump_if(R1, Cond.GE, 1 << (BUCKETS - 2), done)
    a.move(R2, 1)
    for bits in (16, 8, 4, 2, 1):
        smaller = a.unique("bits")
        a.jump_if(R1, Cond.LT, 1 << bits, smaller)
        a.alu(Alu.RSH, R1, bits)
        a.alu(Alu.ADD, R2, bits)
        a.label(smaller)
    a.label(done)
    a.alu(Alu.LSH, R2, 3)
    a.alu(Alu.ADD, R0, R2)
    a.move(R1, 1)
    a.atomic_add(R0, 0, R1)


def _end(a: Assembler) -> bytes:
    a.label(OUT)
    a.exit()
    return a.assemble()


def woken(layout: SwitchLayout, *, watched: int, since: int) -> bytes:
    """A thread became ready: remember when. For sched_wakeup and sched_wakeup_new.

    ``watched`` maps processes to histograms, ``since`` threads to times.
    """
    a = Assembler()
    a.load(U64, R6, R1, 8 * layout.woken)
    a.load(U32, R1, R6, layout.tgid)
    a.store(U32, FP, KEY, R1)
    _lookup(a, watched)
    a.load(U32, R1, R6, layout.pid)
    a.store(U32, FP, KEY, R1)
    a.call(Helper.KTIME_GET_NS)
    a.store(U64, FP, VALUE, R0)
    _put(a, since)
    return _end(a)


def switched(layout: SwitchLayout, *, watched: int, since: int, times: int) -> bytes:
    """A CPU goes from one thread to the next, for sched_switch.

    The one that leaves while it could go on waits from now; the one that comes has waited.
    """
    a = Assembler()
    a.load(U64, R6, R1, 8 * layout.previous)
    a.load(U64, R7, R1, 8 * layout.following)
    a.load(U64, R8, R1, 0)  # whether it was preempted, a bool
    a.load(U32, R1, R6, layout.tgid)
    a.store(U32, FP, KEY, R1)
    _find(a, watched)
    a.jump_if(R0, Cond.EQ, 0, "coming")
    a.alu(Alu.AND, R8, 0xFF)
    a.jump_if(R8, Cond.NE, 0, "waits")
    a.load(U32, R1, R6, layout.state)
    a.jump_if(R1, Cond.NE, 0, "coming")
    a.label("waits")
    a.load(U32, R1, R6, layout.pid)
    a.store(U32, FP, KEY, R1)
    a.call(Helper.KTIME_GET_NS)
    a.store(U64, FP, VALUE, R0)
    _put(a, since)

    a.label("coming")
    a.load(U32, R1, R7, layout.tgid)
    a.store(U32, FP, KEY, R1)
    _lookup(a, watched)
    a.load(U32, R1, R0, 0)
    a.store(U32, FP, SLOT, R1)
    a.load(U32, R1, R7, layout.pid)
    a.store(U32, FP, KEY, R1)
    _lookup(a, since)
    a.load(U64, R6, R0, 0)
    _delete(a, since)
    a.call(Helper.KTIME_GET_NS)
    a.alu(Alu.SUB, R0, R6)
    a.move(R6, R0)
    _observe(a, times, R6)
    return _end(a)


def _call_of(a: Assembler, layout: CallLayout, labels: dict[int, str]) -> None:
    """Go to the label of the system call that has just ended; R6 its registers, R7 its result."""
    a.load(U64, R6, R1, 8 * layout.registers)
    a.load(U64, R7, R1, 8 * layout.result)
    a.load(U32, R2, R6, layout.number)
    for number, label in labels.items():
        a.jump_if(R2, Cond.EQ, number, label)
    a.jump(OUT)


def _descriptor_key(a: Assembler, descriptor: Reg) -> None:
    """KEY becomes process and descriptor; the register must outlast a call."""
    _current_process(a, R1)
    a.store(U32, FP, KEY, R1)
    a.store(U32, FP, KEY + 4, descriptor)


READS: Final = ("read", "readv", "recvfrom", "recvmsg")
SENDS: Final = ("write", "writev", "sendto", "sendmsg", "sendfile")
ACCEPTS: Final = ("accept", "accept4")


def sockets(
    layout: CallLayout, arch: Arch, *, listening: int, connections: int, times: int
) -> bytes:
    """Times on accepted connections, for sys_exit: only those in ``connections``, which it adds
    itself for descriptors in ``listening``, count. Sees sizes and times.

    Books the histograms reply (last read → first write), second write (last read → second write)
    and gap (between writes of one reply), the first of which the connection names.
    """
    a = Assembler()
    labels = {arch.calls[name]: "received" for name in READS}
    labels |= {arch.calls[name]: "sent" for name in SENDS}
    labels |= {arch.calls[name]: "accepted" for name in ACCEPTS}
    labels[arch.calls["close"]] = "closed"
    _call_of(a, layout, labels)

    a.label("received")
    a.jump_if(R7, Cond.SLE, 0, OUT)
    a.load(U64, R8, R6, layout.first)
    _descriptor_key(a, R8)
    _lookup(a, connections)
    a.move(R6, R0)
    a.call(Helper.KTIME_GET_NS)
    a.store(U64, R6, ASKED, R0)
    a.store(U32, R6, WRITES, 0)
    a.jump(OUT)

    a.label("sent")
    a.jump_if(R7, Cond.SLE, 0, OUT)
    a.load(U64, R8, R6, layout.first)
    _descriptor_key(a, R8)
    _lookup(a, connections)
    a.move(R6, R0)
    a.call(Helper.KTIME_GET_NS)
    a.move(R7, R0)
    a.load(U64, R8, R6, ASKED)
    a.jump_if(R8, Cond.EQ, 0, OUT)  # its request was before our time
    a.load(U32, R9, R6, WRITES)
    a.move(R1, R9)
    a.alu(Alu.ADD, R1, 1)
    a.store(U32, R6, WRITES, R1)
    a.load(U64, R2, R6, WROTE)
    a.store(U64, R6, WROTE, R7)
    a.load(U32, R1, R6, FIRST)
    a.store(U32, FP, SLOT, R1)
    a.move(R6, R7)
    a.alu(Alu.SUB, R6, R2)  # since the last write
    a.alu(Alu.SUB, R7, R8)  # since the request
    a.jump_if(R9, Cond.EQ, 0, "reply")
    a.alu(Alu.ADD, R1, GAP)
    a.store(U32, FP, SLOT, R1)
    _observe(a, times, R6)
    a.jump_if(R9, Cond.NE, 1, OUT)
    a.load(U32, R1, FP, SLOT)
    a.alu(Alu.SUB, R1, GAP - SECOND_WRITE)
    a.store(U32, FP, SLOT, R1)
    a.label("reply")
    _observe(a, times, R7)
    a.jump(OUT)

    a.label("accepted")
    a.jump_if(R7, Cond.SLE, 0, OUT)
    a.load(U64, R8, R6, layout.first)
    _descriptor_key(a, R8)
    _lookup(a, listening)
    a.load(U32, R1, R0, 0)
    a.store(U32, FP, KEY + 4, R7)
    for place in range(0, CONNECTION_BYTES, 8):
        a.store(U64, FP, _CONNECTION + place, 0)
    a.store(U32, FP, _CONNECTION + FIRST, R1)
    _put(a, connections, value=_CONNECTION)
    a.jump(OUT)

    a.label("closed")
    a.jump_if(R7, Cond.NE, 0, OUT)
    a.load(U64, R8, R6, layout.first)
    _descriptor_key(a, R8)
    _delete(a, connections)
    return _end(a)


REPLY, SECOND_WRITE, GAP = 0, 1, 2
"""Histograms of a server's connections."""
_CONNECTION: Final = -64


def frames(
    layout: CallLayout, arch: Arch, *, cores: int, scratch: int, ring: int, lost: int, limit: int
) -> bytes:
    """What the processes in ``cores`` receive and send by recvfrom and sendto, for sys_exit.

    Puts the header, then the first bytes of each, into the ring: ``INBOUND_BYTES`` of what is
    received, at most ``limit`` of what is sent. Counts in ``lost`` when the ring is full.
    """
    a = Assembler()
    _call_of(a, layout, {arch.calls["recvfrom"]: "inbound", arch.calls["sendto"]: "outbound"})
    a.label("inbound")
    a.move(R8, INBOUND)
    a.jump("moved")
    a.label("outbound")
    a.move(R8, OUTBOUND)
    a.label("moved")
    a.jump_if(R7, Cond.SLE, LEAST_BYTES, OUT)
    _current_process(a, R1)
    a.store(U32, FP, KEY, R1)
    _lookup(a, cores)
    _only(a, scratch)
    a.move(R9, R0)
    _only(a, lost)
    a.load(U64, R1, R0, 0)
    a.store(U64, R9, 24, R1)
    a.call(Helper.KTIME_GET_NS)
    a.store(U64, R9, 0, R0)
    a.load(U32, R1, FP, KEY)
    a.store(U32, R9, 8, R1)
    a.load(U64, R1, R6, layout.first)
    a.store(U32, R9, 12, R1)
    a.store(U32, R9, 16, R7)
    a.store(U32, R9, 20, R8)
    a.load(U64, R3, R6, layout.second)
    a.move(R2, INBOUND_BYTES)
    a.jump_if(R8, Cond.EQ, INBOUND, "bounded")
    a.move(R2, limit)
    a.label("bounded")
    a.jump_if(R7, Cond.GE, R2, "cut")
    a.move(R2, R7)
    a.label("cut")
    a.jump_if(R2, Cond.GT, SCRATCH_BYTES - EVENT_HEADER, OUT)  # never; the verifier can't know
    a.move(R7, R2)
    a.move(R1, R9)
    a.alu(Alu.ADD, R1, EVENT_HEADER)
    a.call(Helper.PROBE_READ_USER)
    a.jump_if(R0, Cond.EQ, 0, "read")
    a.move(R7, 0)
    a.label("read")
    a.load_map(R1, ring)
    a.move(R2, R9)
    a.move(R3, R7)
    a.alu(Alu.ADD, R3, EVENT_HEADER)
    a.move(R4, _NO_WAKEUP)
    a.call(Helper.RINGBUF_OUTPUT)
    a.jump_if(R0, Cond.EQ, 0, OUT)
    _only(a, lost)
    a.move(R1, 1)
    a.atomic_add(R0, 0, R1)
    return _end(a)


def _watched_thread(a: Assembler, watched: int) -> None:
    """KEY becomes the thread, PROCESS its process; R0 points to what ``watched`` has for that, or
    the program ends. The call is counted there.
    """
    a.call(Helper.GET_CURRENT_PID_TGID)
    a.store(U64, FP, KEY, R0)
    a.alu(Alu.RSH, R0, 32)
    a.store(U64, FP, PROCESS, R0)
    _lookup(a, watched, PROCESS)
    a.move(R1, 1)
    a.atomic_add(R0, 8, R1)


def entered(*, watched: int, since: int) -> bytes:
    """A function is called: remember when, by thread. For a uprobe."""
    a = Assembler()
    _watched_thread(a, watched)
    a.call(Helper.KTIME_GET_NS)
    a.store(U64, FP, VALUE, R0)
    _put(a, since)
    return _end(a)


def returned(*, watched: int, since: int, times: int, stage: int) -> bytes:
    """It returns: book how long it took into the process's histogram ``stage``."""
    a = Assembler()
    _watched_thread(a, watched)
    a.load(U32, R1, R0, 0)
    a.alu(Alu.ADD, R1, stage)
    a.store(U32, FP, SLOT, R1)
    _lookup(a, since)
    a.load(U64, R6, R0, 0)
    _delete(a, since)
    a.call(Helper.KTIME_GET_NS)
    a.alu(Alu.SUB, R0, R6)
    a.move(R6, R0)
    _observe(a, times, R6)
    return _end(a)


WATCHED_BYTES: Final = 16
"""Of a process whose functions are probed: its first histogram (u32), and the calls (u64 at 8)."""
TLS_REPLY, TLS_FIRST_EVENT, TLS_WRITE = 0, 1, 2
"""Histograms of a server's TLS sessions."""
_SESSION: Final = -56
"""Stack: key of a session, the library's pointer and the process."""
_TLS_VALUE: Final = -80
_PREFIX: Final = -96
_PATTERN_BYTES: Final = 5
_HEAD: Final = b"HTTP/"
_EVENTS: Final = (b"data:", b"event")


def tls_read_entered(arch: Arch, *, watched: int, reading: int) -> bytes:
    """SSL_read or SSL_read_ex is called: remember for which session, by thread."""
    a = Assembler()
    a.move(R6, R1)
    _watched_thread(a, watched)
    a.load(U64, R1, R6, arch.user_args[0])
    a.store(U64, FP, VALUE, R1)
    _put(a, reading)
    return _end(a)


def tls_read_returned(arch: Arch, *, watched: int, reading: int, sessions: int) -> bytes:
    """It returns: when it gave something, a request was read."""
    a = Assembler()
    a.load(U64, R7, R1, arch.user_return)
    _watched_thread(a, watched)
    _lookup(a, reading)
    a.load(U64, R6, R0, 0)
    _delete(a, reading)
    a.alu(Alu.LSH, R7, 32)  # the result is an int; what is above it has no meaning
    a.jump_if(R7, Cond.SLE, 0, OUT)
    _session_key(a, R6)
    a.call(Helper.KTIME_GET_NS)
    _put_session(a, sessions, R0, _ASKED)
    return _end(a)


def tls_write_entered(arch: Arch, *, watched: int, sessions: int, times: int) -> bytes:
    """SSL_write or SSL_write_ex is called: book the times of heads and events.

    Looks at the first ``PREFIX_BYTES`` of what is written, here in the kernel alone, for whether
    it begins a response or holds the beginning of a server-sent event.
    """
    a = Assembler()
    a.move(R6, R1)
    _watched_thread(a, watched)
    a.load(U32, R1, R0, 0)
    a.store(U32, FP, SLOT, R1)
    a.load(U64, R7, R6, arch.user_args[0])
    _session_key(a, R7)
    _find(a, sessions, _SESSION)
    a.jump_if(R0, Cond.NE, 0, "known")
    a.move(R0, 0)
    _put_session(a, sessions, R0, _BEGUN)  # its request was before our time
    a.jump(OUT)
    a.label("known")
    a.move(R9, R0)
    _read_prefix(a, arch)
    a.call(Helper.KTIME_GET_NS)
    a.move(R7, R0)
    a.load(U64, R1, FP, _PREFIX)
    a.load(U64, R2, FP, _PREFIX + 8)
    a.load(U32, R8, R9, STATE)
    a.load_wide(R3, _shifted(_HEAD))
    _window(a, R4, 0)
    a.jump_if(R4, Cond.EQ, R3, "head")
    for pattern in _EVENTS:
        a.load_wide(R3, _shifted(pattern))
        for place in range(PREFIX_BYTES - _PATTERN_BYTES + 1):
            _window(a, R4, place)
            a.jump_if(R4, Cond.EQ, R3, "event")
    a.jump(OUT)

    a.label("head")
    a.jump_if(R8, Cond.NE, _ASKED, OUT)
    a.store(U32, R9, STATE, _BEGUN)
    a.load(U64, R1, R9, ASKED)
    a.alu(Alu.SUB, R7, R1)
    _observe(a, times, R7)  # TLS_REPLY is the first
    a.jump(OUT)

    a.label("event")
    a.store(U32, R9, STATE, _STREAMS)
    a.load(U64, R6, R9, LAST_EVENT)
    a.store(U64, R9, LAST_EVENT, R7)
    a.load(U32, R1, FP, SLOT)
    a.jump_if(R8, Cond.EQ, _STREAMS, "next")
    a.load(U64, R6, R9, ASKED)
    a.jump_if(R6, Cond.EQ, 0, OUT)
    a.alu(Alu.ADD, R1, TLS_FIRST_EVENT - TLS_WRITE)
    a.label("next")
    a.alu(Alu.ADD, R1, TLS_WRITE)
    a.store(U32, FP, SLOT, R1)
    a.alu(Alu.SUB, R7, R6)
    _observe(a, times, R7)
    return _end(a)


def _session_key(a: Assembler, pointer: Reg) -> None:
    a.store(U64, FP, _SESSION, pointer)
    a.load(U64, R1, FP, PROCESS)
    a.store(U64, FP, _SESSION + 8, R1)


def _put_session(a: Assembler, sessions: int, asked: Reg, state: int) -> None:
    a.store(U64, FP, _TLS_VALUE + ASKED, asked)
    a.store(U64, FP, _TLS_VALUE + LAST_EVENT, 0)
    a.store(U64, FP, _TLS_VALUE + STATE, state)
    _put(a, sessions, _SESSION, _TLS_VALUE)


def _read_prefix(a: Assembler, arch: Arch) -> None:
    """The first bytes that the registers at R6 say are written, zeros behind the end."""
    for place in range(0, PREFIX_BYTES, 8):
        a.store(U64, FP, _PREFIX + place, 0)
    a.load(U64, R3, R6, arch.user_args[1])
    a.load(U64, R2, R6, arch.user_args[2])
    a.truncate(R2, R2)
    a.jump_if(R2, Cond.LE, PREFIX_BYTES, "short")
    a.move(R2, PREFIX_BYTES)
    a.label("short")
    a.move(R1, FP)
    a.alu(Alu.ADD, R1, _PREFIX)
    a.call(Helper.PROBE_READ_USER)


def _window(a: Assembler, register: Reg, place: int) -> None:
    """Bytes from ``place`` on of the prefix in R1 and R2, at the upper end of the register."""
    if place < 8:
        a.move(register, R1)
        a.alu(Alu.RSH, register, 8 * place)
        if place > 8 - _PATTERN_BYTES:
            a.move(R5, R2)
            a.alu(Alu.LSH, R5, 64 - 8 * place)
            a.alu(Alu.OR, register, R5)
    else:
        a.move(register, R2)
        a.alu(Alu.RSH, register, 8 * (place - 8))
    a.alu(Alu.LSH, register, 64 - 8 * _PATTERN_BYTES)


def _shifted(pattern: bytes) -> int:
    """What :func:`_window` gives where the pattern stands."""
    return int.from_bytes(pattern, "little") << (64 - 8 * _PATTERN_BYTES)
