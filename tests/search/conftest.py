"""A database server for the tests of searches."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A real server of its own, on a free port; the URL of its database."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [
        Path(one) for one in [shutil.which("initdb")] if one
    ]
    pytest.importorskip("psycopg")
    if not found:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        as_owner = []
        if os.getuid() == 0:  # which the server refuses to run as
            shutil.chown(folder, "postgres")
            as_owner = ["runuser", "-u", "postgres", "--"]

        def run(name: str, *arguments: str) -> None:
            command = [*as_owner, str(found[-1].with_name(name)), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

        run("initdb", "-A", "trust", "-U", "worker")
        run("pg_ctl", "-w", "-l", f"{folder}/log", "-o", f"-p {port} -k {folder} -h 127.0.0.1", "start")
        try:
            yield f"postgresql://worker@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
