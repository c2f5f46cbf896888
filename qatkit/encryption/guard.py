"""Removes a folder when the parent process has ended: `python guard.py FOLDER PARENT` (PARENT is its process id).

A process that is killed cannot remove its folder, so the guard does it instead. The guard ignores the signals that a
terminal or a cluster sends to all processes. It imports nothing from this project, so that it starts in milliseconds.
"""

import fcntl
import os
import shutil
import signal
import sys
import time

_SECONDS = 0.1  # time between two checks


def main() -> None:
    """Waits until the parent process has ended or the folder is gone, then removes what is left of it."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        held = os.open(os.path.join(folder, ".lock"), os.O_RDONLY)
    except FileNotFoundError:  # the job has ended already
        return
    fcntl.flock(held, fcntl.LOCK_SH)  # other processes see that the folder is in use
    while os.getppid() == parent and os.path.isdir(folder):
        time.sleep(_SECONDS)
    while os.path.isdir(folder):  # other children of the parent may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_SECONDS)


if __name__ == "__main__":
    main()
