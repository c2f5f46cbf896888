"""Handles signals: the first one ends the run at its next safe point, without losing finished work.

    any of SIGNALS ─ the first ──> raises Stopped where the program is; in training, once the step is done
                   a later SIGINT ──> ends the process at once, as a kill would

Only the command line handles signals (`served`): a library must not take an application's signals, nor those
for which a cluster's launcher has handlers already. Safe points check `wanted`, so that a signal is not lost
if other code caught its exception. Files are complete or absent at any moment (`qatkit_verify.files`), so
stopping anywhere is safe. Only training waits, so that it can save a checkpoint after the current step. This
module does not need torch.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)  # clusters send one of the last two before they reclaim a machine


class Stopped(SystemExit):
    """Raised when a signal ends the run; the exit status is 128 plus the signal's number, as in a shell.

    Attributes:
        where: a description of how far the run had come; "" if that is unknown.
        again: a description of what the same command would do next time; "" by default.
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(128 + number)
        self.where, self.again = where, ""


class _State:
    """The state of this process; there is only one, since signals are sent to processes."""

    server: int | None = None  # the process whose command line handles signals
    wanted: int | None = None  # the signal that is being handled
    waits = False  # whether the program itself checks `wanted`


@contextmanager
def served() -> Iterator[None]:
    """Within the block, makes each of SIGNALS that has no handler yet end the run at its next safe point.

    Only the main thread can set handlers; in others nothing changes. Once a signal has arrived, the handlers
    stay until the process ends.
    """
    own = [number for number in SIGNALS if _is_free(number)]
    before = {number: signal.signal(number, _serve) for number in own}
    outer, _State.server = _State.server, os.getpid()
    try:
        yield
    finally:
        if _State.wanted is None:
            _State.server = outer
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_free(number: int) -> bool:
    in_main = threading.current_thread() is threading.main_thread()  # handlers can only be set there
    return in_main and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _serve(number: int, _: FrameType | None) -> None:
    if _State.server != os.getpid():
        return  # this process was forked from the one that handles signals
    if _State.wanted is not None:
        if number == signal.SIGINT:
            os._exit(128 + number)
        return
    _State.wanted = number
    if not _State.waits:
        raise Stopped(number)


def serving() -> bool:
    """Returns whether signals are handled in this process."""
    return _State.server == os.getpid()


def wanted() -> int | None:
    """Returns the signal that asks the run to end, if any."""
    return _State.wanted


def check(where: str = "") -> None:
    """Marks a safe point: raises Stopped if a signal asks the run to end."""
    if _State.wanted is not None:
        raise Stopped(_State.wanted, where)


def wait(waits: bool) -> None:
    """Sets whether signals wait for `check` from now on.

    Lightning replaces our handler by its own, which ends training without a checkpoint. So ours is restored.
    """
    _State.waits = waits and serving()
    if _State.waits:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if _serve in getattr(handler, "signal_handlers", ()):
                signal.signal(number, _serve)


def waits() -> bool:
    """Returns whether the program itself checks for signals at its safe points, as training does."""
    return _State.waits


@contextmanager
def heard(tell: Callable[[int], None]) -> Iterator[None]:
    """Makes a thread call `tell` with each of SIGNALS that arrives within the block.

    Python calls handlers only between its own instructions. A process that waits in a library's code for
    other processes, which may be gone, would handle no signal. Outside the main thread, and where signals are
    not handled, there is no such thread.
    """
    if not serving() or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_tell_of_each, args=(ours, tell), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.shutdown(socket.SHUT_WR)  # a copy in an image-loading process would keep it open
        thread.join()
        ours.close()
        theirs.close()


def _tell_of_each(signals: socket.socket, tell: Callable[[int], None]) -> None:
    while number := signals.recv(1):
        if number[0] in SIGNALS:  # others have handlers too: torch handles SIGCHLD if processes load images
            tell(number[0])


def leave_to_parent(_: int = 0) -> None:
    """Leaves signals to the parent in an image-loading process.

    A terminal or a cluster sends signals to all processes, and the parent decides what to do.

    The first SIGTERM is ignored; a second one is from the parent, which wants the process to end.
    """
    signal.set_wakeup_fd(-1)  # signals to this process must not reach the parent's thread
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
