"""Signals that end a run at its next safe point, with what was done kept.

    any of SIGNALS ─ the first ──> raises Stopped where the program is; in training, once the step is done
                   a SIGINT behind it ──> ends the process at once, as a kill would

Only the command line serves them (`served`): a library must not take an application's signals, nor those that a
launcher of clusters has handlers for already. Safe points ask `wanted`, so that a signal whose exception somebody
swallowed is not lost. Files are whole or absent at any moment (`qatkit_verify.files`), so stopping anywhere is
safe; training alone waits, since the step that it is in can be kept. No torch here.
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
)  # clusters send one of the last two before they take a machine back


class Stopped(SystemExit):
    """A signal ends the run; the exit status is 128 and its number, as a shell has it.

    Attributes:
        where: how far the run had come, for people; "" where nothing is known of it.
        again: what the same command would do, for people; "" as always.
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(128 + number)
        self.where, self.again = where, ""


class _State:
    """Of this process, since a signal is sent to processes."""

    server: int | None = None  # the process whose command line serves signals
    wanted: int | None = None  # the signal that is being served
    waits = False  # whether the program itself looks at `wanted`


@contextmanager
def served() -> Iterator[None]:
    """Within, a signal ends the run at its next safe point. Signals that have a handler already keep it.

    Behind a signal the handlers stay, until the process ends.
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
    in_main = threading.current_thread() is threading.main_thread()  # where alone handlers can be set
    return in_main and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _serve(number: int, _: FrameType | None) -> None:
    if _State.server != os.getpid():
        return  # a process that was forked from the one that decides
    if _State.wanted is not None:
        if number == signal.SIGINT:
            os._exit(128 + number)
        return
    _State.wanted = number
    if not _State.waits:
        raise Stopped(number)


def serving() -> bool:
    """Whether signals are served in this process."""
    return _State.server == os.getpid()


def wanted() -> int | None:
    """The signal that asks the run to end."""
    return _State.wanted


def check(where: str = "") -> None:
    """A safe point: raises Stopped where a signal asks for it."""
    if _State.wanted is not None:
        raise Stopped(_State.wanted, where)


def wait(waits: bool) -> None:
    """From now on signals wait for `check`, or no more.

    Lightning puts a handler of its own in front of ours, which ends training without a checkpoint: ours is put back.
    """
    _State.waits = waits and serving()
    if _State.waits:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if _serve in getattr(handler, "signal_handlers", ()):
                signal.signal(number, _serve)


def waits() -> bool:
    """Whether the program itself looks for signals at its safe points, as training does."""
    return _State.waits


@contextmanager
def heard(tell: Callable[[int], None]) -> Iterator[None]:
    """Within, a thread calls `tell` with each of SIGNALS, wherever the program is.

    Python calls handlers between its own instructions alone: a process that waits for others in a library's code, for
    ever if they are gone, would serve none. Nothing happens where signals are not served.
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
        theirs.shutdown(socket.SHUT_WR)  # a copy in a process that loads images would keep it open
        thread.join()
        ours.close()
        theirs.close()


def _tell_of_each(signals: socket.socket, tell: Callable[[int], None]) -> None:
    while number := signals.recv(1):
        if number[0] in SIGNALS:  # others have handlers, too: torch's of SIGCHLD, once processes load images
            tell(number[0])


def leave_to_parent(_: int = 0) -> None:
    """In a process that loads images: a terminal and a cluster signal all processes, and the first one decides.

    Of SIGTERM the first is passed over; another is from the parent, which wants the process to end.
    """
    signal.set_wakeup_fd(-1)  # its signals are not its parent's
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
