"""A real Slurm of two nodes on this machine: munged, slurmctld, and a slurmd for each node, in a directory of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.ci import needs
from support.site import CHECKOUT
from support.until import until

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")


def lacking_programs() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]


def needs_slurm() -> None:
    lacking = lacking_programs()
    needs(f"{', '.join(lacking)} of the packages slurm-wlm and munge not installed" if lacking else "")


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Cluster:
    """Two nodes; partition ``high`` preempts jobs of ``low``, which have 20 seconds then."""

    def __init__(self, top: Path, cpus: int = 1) -> None:
        self.top = top
        self._cpus = cpus
        self.conf = top / "slurm.conf"
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(self.conf),
            "PYTHONPATH": str(CHECKOUT),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all of it; return when both nodes are idle."""
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.top / name).mkdir(mode=0o755)
        key = self.top / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self.write_conf(_free_ports(3))
        # Forced: it warns of directories that others may write to, such as /tmp.
        self._launch(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.top}/munge/socket",
            f"--pid-file={self.top}/munge/pid", f"--log-file={self.top}/munge/log", f"--seed-file={self.top}/munge/seed",
        )  # fmt: skip
        until("the socket of munged", (self.top / "munge/socket").is_socket)
        self._launch("slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        until("two idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"])

    def write_conf(self, ports: list[int]) -> None:
        host, top = socket.gethostname().partition(".")[0], self.top
        self.set_hooks("exit 0")
        nodes = "".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} State=UNKNOWN\n"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        self.conf.write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={top}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool-%n
SlurmctldPidFile={top}/ctld.pid
SlurmdPidFile={top}/%n.pid
SlurmctldLogFile={top}/ctld.log
SlurmdLogFile={top}/%n.log
SlurmctldPort={ports[0]}
SlurmdTimeout=6
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Prolog={top}/prolog.sh
Epilog={top}/epilog.sh
TaskProlog={top}/task-prolog.sh
PrologFlags=Alloc
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""
        )

    def set_hooks(self, lines: str) -> None:
        """Have the hooks run lines of a shell script, in which $hook is ``prolog``, ``task-prolog`` or ``epilog``."""
        for hook in ("prolog", "task-prolog", "epilog"):
            script = self.top / f"{hook}.new"
            script.write_text(f"#!/bin/sh\nhook={hook}\n{lines}\n")
            script.chmod(0o755)
            script.replace(self.top / f"{hook}.sh")

    def node_states(self) -> list[str]:
        return self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()

    def start_node(self, node: str) -> None:
        self._launch(node, "-D", "-N", node, "-f", str(self.conf), program="slurmd")

    def _launch(self, name: str, *options: str, program: str = "") -> None:
        with open(self.top / f"{name}.out", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [program or name, *options], env=self.environment, cwd=self.top,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def ask(self, *command: str) -> str:
        """Run a program of Slurm and return what it prints; empty while the controller does not answer."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.top,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def submit(
        self, *options: str, script: Path | None = None, wrap: str = "", top: Path | None = None, uid: int = 0
    ) -> str:
        """Submit a job of a user, from a directory, and return its number."""
        what = ["--wrap", wrap] if script is None else [str(script)]
        group = pwd.getpwuid(uid).pw_gid
        done = subprocess.run(
            ["sbatch", "--parsable", *options, *what],
            env=self.environment, cwd=top or self.top, capture_output=True, text=True, timeout=30, check=False,
            user=uid, group=group, extra_groups=[],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def start_now(self, job: str) -> None:
        """Let a requeued job start in a moment, where Slurm has it wait for two minutes."""
        # Not in the second of the requeue: a node refuses credentials that are not younger than that.
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")

    def node_of(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%N")

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as a power failure ends them."""
        daemon = self._processes.pop(node)
        daemon.kill()
        for pid in self._pids(f"SLURMD_NODENAME={node}"):
            status = Path(f"/proc/{pid}/stat")
            with suppress(OSError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                # The manager of a step has no variable with its node.
                if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text():
                    os.kill(parent, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
        daemon.wait(30)

    def _pids(self, variable: str = "") -> list[int]:
        """Return this cluster's processes, or those that have a variable with this value."""
        found = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdecimal() and int(directory.name) != os.getpid():
                with suppress(OSError):
                    variables = (directory / "environ").read_text(errors="replace").split("\0")
                    if f"SLURM_CONF={self.conf}" in variables and (not variable or variable in variables):
                        found.append(int(directory.name))
        return found

    def clear(self) -> None:
        """Cancel all jobs; return when their processes are gone."""

        def is_clear() -> bool:
            if jobs := self.ask("squeue", "-h", "-o", "%A").split():
                self.ask("scancel", *jobs)
            return not jobs

        until("an empty queue", is_clear)
        daemons = {process.pid for process in self._processes.values()}
        until(
            "the end of all steps",
            lambda: not any(self._is_step(pid) for pid in self._pids() if pid not in daemons),
        )

    @staticmethod
    def _is_step(pid: int) -> bool:
        with suppress(OSError):
            return "slurmstepd" in Path(f"/proc/{pid}/cmdline").read_text()
        return False

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(30)
        # The managers of steps, and jobs, outlive slurmd.
        for pid in self._pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def cluster_in(top: Path, cpus: int = 1) -> Iterator[Cluster]:
    """Run a cluster; its logs are in the failure of a test."""
    needs_slurm()
    made = Cluster(top, cpus)
    try:
        made.start()
        yield made
    except BaseException as error:
        logs = "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in sorted(top.glob("*.log"))
        )
        error.args = (f"{error}\n{logs}",)
        raise
    finally:
        made.stop()
