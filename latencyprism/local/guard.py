"""Runs a program that must not outlive its parent: ends it when standard input closes.

Started as a script by :mod:`latencyprism.local.process`; it imports the standard library only. A
pipe is used, not PR_SET_PDEATHSIG, because that signal fires when the *thread* that started the
child ends, and because a pipe works on every Unix. SIGTERM is passed on; SIGUSR1 kills the program,
so that whoever waits for the guard knows that the program is gone too.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 20.0
"""How long the program may take to end once asked."""


def main(command: list[str]) -> int:
    """Run ``command`` until it ends or standard input closes; its exit status as a shell has it."""
    children: list[subprocess.Popen[bytes]] = []
    passed_on = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGKILL}

    def pass_on(number: int, _frame: object) -> None:
        for child in children:
            child.send_signal(passed_on[signal.Signals(number)])

    for number in passed_on:
        signal.signal(number, pass_on)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    children.append(child)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: it returns at the end of the pipe
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
