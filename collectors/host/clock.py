"""What the kernel thinks of its own clock."""

import ctypes

_UNSYNCHRONISED = 0x40

_libc = ctypes.CDLL(None, use_errno=True)


class _Timex(ctypes.Structure):
    """struct timex of 64-bit Linux; ``modes`` of 0 asks without changing anything."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 160),
    )


def clock_error() -> tuple[float, bool] | None:
    """Largest error of the wall clock, microseconds, and whether a time service disciplines it.

    As adjtimex(2) tells; None where the system call is not permitted.
    """
    state = _Timex(modes=0)
    if _libc.adjtimex(ctypes.byref(state)) < 0:
        return None
    return float(state.maxerror), not state.status & _UNSYNCHRONISED
