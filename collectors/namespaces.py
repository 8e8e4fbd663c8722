"""Network namespaces of other processes: containers, mostly."""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def call_in(namespace: str, action: Callable[[], T]) -> T:
    """Result of ``action`` in the network namespace at a path such as ``/proc/123/ns/net``.

    A socket opened there stays there, so that it can be used from any thread afterwards. The
    action runs in a thread that ends with it, because a namespace is a thread's own: the caller
    never leaves its own. Blocks until it is done. Raises what the action raises, and OSError when
    the namespace may not be entered, which takes CAP_SYS_ADMIN.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(descriptor, _CLONE_NEWNET) < 0:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code), namespace)
            finally:
                os.close(descriptor)
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - the caller is told, whatever it is
            errors.append(error)

    thread = threading.Thread(target=enter, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
