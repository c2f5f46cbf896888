"""A one-node Slurm cluster on loopback that runs in its own folder and ends with the test.

It needs neither systemd nor files owned by root: munge's socket and key, and the state and logs of slurmctld
and slurmd are all in that folder.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
KILL_WAIT = 5  # seconds from SIGTERM to SIGKILL; the default is 30
_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
KillWait={kill_wait}
MinJobAge=600
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Returns the commands of Slurm and munge that are not installed."""
    return [name for name in NEEDED if _found(name) is None]


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Runs Slurm and yields the environment in which its commands find it.

    Raises:
        RuntimeError: if the node does not start; the message has the end of the logs.
    """
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(folder=folder, host=host, user=getpass.getuser(), controller=_free_port(), daemon=_free_port(),
                     cpus=os.cpu_count(), kill_wait=KILL_WAIT)
    )  # fmt: skip
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    environment = os.environ | {"SLURM_CONF": str(conf)}
    daemons = [
        ("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        ("slurmctld", "-D", "-f", str(conf)),
        ("slurmd", "-D", "-f", str(conf), "-N", host),
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, *arguments in daemons:
            with (folder / f"{name}.out").open("wb") as out:
                running.append(
                    subprocess.Popen([str(_found(name)), *arguments], stdout=out, stderr=out, env=environment)
                )
            time.sleep(0.5)
        _wait_for_node(environment, folder)
        yield environment
        subprocess.run(["scancel", "--user", getpass.getuser()], env=environment, check=False)
    finally:
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in reversed(running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()


def _wait_for_node(environment: dict[str, str], folder: Path) -> None:
    said = ""
    for _ in range(120):
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
        )
        said = done.stdout.strip() or done.stderr.strip()
        if said == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text(errors="replace")[-800:] for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"no idle node: {said}\n{logs}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
