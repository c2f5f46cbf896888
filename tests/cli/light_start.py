"""Runs commands in forks of a process that, like a script at its start, has imported only the command line.

    stdin, a line each:   {"script": "/.../train.py", "typed": ["--help"], "folder": "/..."}
    stdout, a line each:  {"status": 0, "said": "the text of stderr", "imported": ["hydra", ...]}

"imported" lists top-level packages. Thanks to the forks, Hydra is not imported again for each command.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import IO, Any

import qatkit.cli.command_line  # noqa: F401


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    with _file() as out, _file() as said, _file() as imported:
        child = os.fork()
        if child == 0:
            _become(asked, out, said, imported)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        imported.seek(0)
        return {"status": status, "said": said.read(), "imported": imported.read().split()}


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def _become(asked: dict[str, Any], out: IO[str], said: IO[str], imported: IO[str]) -> None:
    """Runs the command line in the child process, and never returns."""
    status: Any = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.chdir(asked["folder"])
        sys.path[0] = os.path.dirname(asked["script"])
        sys.argv = [asked["script"], *asked["typed"]]
        runpy.run_path(asked["script"], run_name="__main__")
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        print(*{name.partition(".")[0] for name in sys.modules}, file=imported, flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
