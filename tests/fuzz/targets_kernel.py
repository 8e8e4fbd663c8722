"""What the kernel source parses: ELF files, BTF, the kernel's ring, vLLM's messages."""

from collections import Counter

from latencyprism.collectors.kernel.btf import Btf, BtfError
from latencyprism.collectors.kernel.elf import ElfError, function_offsets
from latencyprism.collectors.kernel.frames import V0_32, decode_inbound, decode_outputs, layout_of
from latencyprism.collectors.kernel.libraries import executable_mappings
from latencyprism.collectors.kernel.msgpack import CutError, ShapeError, skip
from latencyprism.collectors.kernel.steps import Engine

ELF_HEAD = b"\x7fELF\x02\x01\x01"
BTF_HEAD = b"\x9f\xeb\x01\x00"


def target_elf(data: bytes) -> None:
    """A library after its first bytes."""
    try:
        function_offsets(ELF_HEAD + data, ["SSL_write"])
    except ElfError:
        return


def target_btf(data: bytes) -> None:
    """A kernel's types after their first bytes."""
    try:
        types = Btf(BTF_HEAD + data)
        types.offset("task_struct", "pid")
        types.tracepoint("sched_switch")
    except BtfError:
        return


def target_proc_maps(data: bytes) -> None:
    """What a process has mapped."""
    executable_mappings(data)


def target_msgpack(data: bytes) -> None:
    """Any value."""
    try:
        skip(data, 0)
    except (CutError, ShapeError):
        return


def target_vllm_outputs(data: bytes) -> None:
    """A message of an engine core."""
    try:
        decode_outputs(data, V0_32)
    except (CutError, ShapeError):
        return


def target_vllm_inbound(data: bytes) -> None:
    """A message to an engine core, of a request (as it begins) or anything else."""
    for begins in (b"", b"\x01\x01\x00", b"\x01\x01\x01"):
        try:
            decode_inbound(begins + data, V0_32)
        except (CutError, ShapeError):
            continue


def target_vllm_version(data: bytes) -> None:
    """What an engine calls its version."""
    layout_of(data.decode(errors="replace"))


def target_vllm_connection(data: bytes) -> None:
    """Pieces of a connection; the first byte of each tells its length and how much was not read."""
    engine = Engine(V0_32, Counter())
    at = 0
    while at < len(data):
        length, unread = data[at] >> 2, data[at] & 3
        piece = data[at + 1 : at + 1 + length]
        engine.outbound(at, unread, piece, len(piece) + 40 * unread)
        at += 1 + length
    engine.take(1 << 62)
