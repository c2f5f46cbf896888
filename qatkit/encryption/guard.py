"""Removes a folder once its process is gone: `python guard.py FOLDER PROCESS`, a child of that process.

A process that is killed can't clean up after itself. This one does only that. It ignores the signals that a
terminal or a cluster sends to all processes, and imports nothing from this project, so that it starts in
milliseconds.
"""

import fcntl
import os
import shutil
import signal
import sys
import time

_SECONDS = 0.1  # between two checks


def main() -> None:
    """Waits for the end of the parent process, then removes the folder."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        held = os.open(os.path.join(folder, ".lock"), os.O_RDONLY)
    except FileNotFoundError:  # the job was over at once
        return
    fcntl.flock(held, fcntl.LOCK_SH)  # prevents another process from taking the folder for an abandoned one
    while os.getppid() == parent and os.path.isdir(folder):
        time.sleep(_SECONDS)
    while os.path.isdir(folder):  # other children of the parent may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_SECONDS)


if __name__ == "__main__":
    main()
