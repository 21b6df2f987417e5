"""Jobs of a real Slurm on a bad day: random stories, one after the other, on two nodes of two processors, with one daemon.

The scripts are those that are shipped: slurm.sbatch, and the prolog, epilog and task prolog. A story is judged when its jobs have
ended: a training has the bits of an undisturbed one and begins each run at the step where the one before was told to end; what is
not as it should be is in the log of the job; no node is drained but by a hook that was itself killed; no mount, root, record, note,
debt or process is left; files of a user who has no job are neither changed nor read. The training needs NumPy alone: the start of
torch takes longer than all else that a run does.
"""

from __future__ import annotations

import functools
import os
import pwd
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
from support.live import Live, installed
from support.site import CHECKOUT
from support.slurm_cluster import NODES, Cluster, cluster_in, lacking_programs
from support.slurm_training import RUN_STEPS
from support.until import until
from torture.figure import Figure

from ciuic.config.owed_snapshots import owed_snapshots
from ciuic.system import mountinfo

_SECONDS = 90.0
"""Longest wait for one event of a story."""
_PATH = f"{CHECKOUT}:{CHECKOUT / 'tests'}"
_USERS_PATH = f"{_PATH}:{Path(numpy.__file__).parents[1]}"
"""Of programs of users, whose interpreter may be another one, without our libraries."""
_OTHERS = "games", "news", "lp"
_TRAIN = """\
import os, sys
from pathlib import Path
from support.slurm_training import main
rank = os.environ["SLURM_PROCID"] if os.environ.get("SLURM_NTASKS", "1") != "1" else ""
save = Path(sys.argv[1] + rank)
top = Path(f"{save}.d")
top.mkdir(exist_ok=True)
seed = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")) + 10 * int(rank or 0)
main(top, int(os.environ["STEPS"]), int(os.environ["EVERY"]), saves=save, seed=seed)
"""


class _Broken(Exception):
    """A promise is broken."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Tell stories until the time is over, each kind at least once if there is time for it."""
    if lacking := lacking_programs():
        return [Figure(f"Slurm: {', '.join(lacking)} are not installed", 0)]
    if not (python := _users_python()):
        return [Figure("Slurm: no interpreter that users can run", 0)]
    end, dice = time.monotonic() + seconds, random.Random(seed)
    top = Path(tempfile.mkdtemp())
    # Users go through both.
    top.parent.chmod(0o711)
    top.chmod(0o711)
    kinds = os.environ.get("CIUIC_SLURM_STORIES", " ".join(_STORIES)).split()
    counts: Counter[str] = Counter()
    failures: dict[str, list[str]] = {kind: [] for kind in kinds}
    with _world(top, python, dice) as world:
        order: list[str] = []
        while not counts or time.monotonic() < end:
            order = order or dice.sample(kinds, len(kinds))
            kind, number = order.pop(), counts.total()
            began, kept = time.monotonic(), "kept"
            world.begin(f"{number}")
            try:
                _STORIES[kind](world)
                world.judge()
            except (_Broken, TimeoutError, AssertionError) as error:
                kept = "BROKEN"
                failures[kind].append(
                    f"story {number} of seed {seed} ({world.told}): {error}\n{world.logs()}"
                )
            counts[kind] += 1
            sys.stdout.write(f"{number} {kind}: {world.told} {time.monotonic() - began:.0f} s {kept}\n")
            sys.stdout.flush()
            world.end()
    return [Figure(f"stories of Slurm: {kind}", counts[kind], tuple(failures[kind])) for kind in kinds] + [
        Figure(f"in stories of Slurm: {what}", count) for what, count in sorted(world.counts.items())
    ]


def _users_python() -> str:
    """Return an interpreter that users can run, with the libraries of this one; empty if there is none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}"):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [python, "-c", "import ciuic, numpy"], user=pwd.getpwnam(_OTHERS[0]).pw_uid, cwd="/", check=True,
                env={**os.environ, "PYTHONPATH": _USERS_PATH}, stderr=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
            return python
    return ""


@contextmanager
def _world(top: Path, python: str, dice: random.Random) -> Iterator[_World]:
    for name in ("slurm", "live", "fates"):
        (top / name).mkdir(mode=0o755)
    with cluster_in(top / "slurm", cpus=2) as cluster, Live(top / "live") as live:
        bin_ = top / "bin"
        bin_.mkdir()
        (bin_ / "python").symlink_to(python)
        (bin_ / "ciuic").write_text(f'#!/bin/sh\nexec {python} -m ciuic "$@"\n')
        (bin_ / "ciuic").chmod(0o755)
        cluster.environment |= {"PYTHONPATH": _USERS_PATH, "PATH": f"{bin_}:{cluster.environment['PATH']}"}
        cluster.environment.pop("TMPDIR", None)
        # As the configuration of a node, which any user may read.
        live.env["PYTHONPATH"] = _PATH
        live.config.chmod(0o644)
        (top / "live/run").chmod(0o755)
        yield _World(top, cluster, live, dice)


class _World:
    """A cluster, a daemon, users, and what the story that is told has begun."""

    def __init__(self, top: Path, cluster: Cluster, live: Live, dice: random.Random) -> None:
        self.cluster, self.live, self.dice, self.top = cluster, live, dice, top
        self.users = [pwd.getpwnam(name).pw_uid for name in _OTHERS[:2]]
        self.counts: Counter[str] = Counter()
        self.place = top
        self.told = ""
        self._sweeps = self._resumes = False
        self._helped = 0.0
        self._bystander = self._directory(top, "bystander", pwd.getpwnam(_OTHERS[2]).pw_uid)
        (self._bystander / "file").write_text("theirs")
        # Read once since its last change, a file has a newer time of access (relatime).
        os.utime(self._bystander / "file", (1, 2))
        os.utime(self._bystander, (1, 2))
        self._seen = self._look()
        self._set_hooks()
        live.start()

    def _set_hooks(self) -> None:
        given = {
            "CIUIC": str(installed()), "CIUIC_CONFIG": str(self.live.config), "PYTHONPATH": _PATH,
            "CIUIC_SLURM_NOTES": f"{self.top}/notes", "XDG_STATE_HOME": f"{self.top}/state",
        }  # fmt: skip
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
        fate = f"{self.top}/fates/$hook-$SLURMD_NODENAME"
        self.cluster.set_hooks(
            f"export {words}\nbefore=\nif mv {fate} {fate}.met 2>/dev/null; then . {fate}.met; fi\n"
            f"exec $before {CHECKOUT}/etc/slurm/$hook.sh"
        )

    # -- a story

    def begin(self, name: str) -> None:
        self.place, self.told = self.top / name, ""
        self.place.mkdir(mode=0o711)
        self._sweeps = self._resumes = False

    def tell(self, text: str) -> None:
        self.told += f"{', ' if self.told else ''}{text}"
        self.counts[text.rstrip("0123456789.").strip()] += 1

    def end(self) -> None:
        """Have the next story find an empty cluster, also after a story that has failed."""
        for fate in (self.top / "fates").iterdir():
            fate.unlink()
        self.cluster.clear()
        self._resume()
        if self.live.daemon is None:
            self.live.start()

    def _directory(self, top: Path, name: str, uid: int) -> Path:
        path = top / name
        path.mkdir(mode=0o700)
        os.chown(path, uid, 0)
        return path

    def directory(self, name: str, uid: int) -> Path:
        return self._directory(self.place, name, uid)

    def fate(self, hook: str, node: str) -> str:
        """Have the next hook of this kind on a node meet something bad, or nothing; return a word for it."""
        kind = self.dice.choice(["well", "well", "well", "killed", "killed", "limit", "missing", "shell"])
        # The commands need about two seconds.
        at = round(self.dice.uniform(0.1, 4), 2)
        lines = {
            "killed": f'CIUIC="timeout -s KILL {at} $CIUIC"',
            "limit": f"export CIUIC_SLURM_SECONDS={at}",
            "missing": "CIUIC=/nonexistent/ciuic",
            "shell": f'before="timeout -s KILL {at}"',
        }
        if kind != "well":
            (self.top / "fates" / f"{hook}-{node}").write_text(lines[kind] + "\n")
            self._sweeps = True
            # Slurm drains a node whose hook was killed.
            self._resumes |= kind == "shell"
            self.tell(f"{hook} {kind} {at}")
        return kind

    def submit(
        self, uid: int, where: Path, *options: str, script: Path | None = None, lines: str = ""
    ) -> str:
        """Submit a job from a directory; its log is there, too."""
        if script is None:
            script = where / "job.sh"
            script.write_text(f"#!/bin/bash\n{lines}\n")
            script.chmod(0o755)
        return self.cluster.submit(
            "--partition=low", "--requeue", f"--output={where}/out", "--open-mode=append", *options,
            script=script, top=where, uid=uid,
        )  # fmt: skip

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        return until(what, condition, _SECONDS)

    def until_over(self, job: str, *states: str) -> str:
        """Wait for the end of a job, and return its state."""

        def over() -> str:
            state = self.cluster.state(job)
            if state == "PENDING":
                self.help_start(job)
            return state if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "") else ""

        found: str = self.until(f"the end of job {job}", over)
        if found not in states:
            raise _Broken(f"job {job} is {found}, not {' or '.join(states)}")
        return found

    def help_start(self, job: str) -> None:
        """Start a requeued job now and then, also where a hook was killed: Slurm has drained the node then and held the job."""
        if time.monotonic() > self._helped + 6:
            if self._resumes:
                self._resume()
                self.cluster.ask("scontrol", "release", job)
            self.cluster.start_now(job)
            self._helped = time.monotonic()

    def _resume(self) -> None:
        if set(self.cluster.node_states()) != {"idle"}:
            self.cluster.ask("scontrol", "update", f"NodeName={','.join(NODES)}", "State=RESUME")

    def preempt(self, job: str) -> None:
        """Have another job take the node of a job, which waits in the queue then and may start again."""
        nodes = self.cluster.node_of(job)
        other = self.cluster.submit(
            "--partition=high", "--exclusive", f"--nodelist={nodes}", f"--nodes={1 + ('[' in nodes)}", "--output=/dev/null",
            wrap="sleep 600",
        )  # fmt: skip
        self.requeued(job)
        if "[" in nodes or self.dice.random() < 0.5:
            self.cluster.ask("scancel", other)
            self.until(
                "the other job's end", lambda: self.cluster.state(other) not in ("RUNNING", "COMPLETING")
            )
            return
        self.until("the next run", lambda: self.cluster.state(job) == "RUNNING")
        self.cluster.ask("scancel", other)

    def requeued(self, job: str) -> None:
        self.until(f"the requeue of {job}", lambda: self.cluster.state(job) == "PENDING")
        self.cluster.start_now(job)

    def kill_daemon(self) -> None:
        self.live.stop(signal.SIGKILL)
        self.tell("daemon killed")

    def start_daemon(self) -> None:
        if self.live.daemon is None:
            self.live.start()

    def mounted(self, path: Path) -> bool:
        return os.fsencode(path) in {mount.mount_point for mount in mountinfo.read()}

    # -- the judgement

    def judge(self) -> None:
        self.start_daemon()
        self.until("the end of all jobs", lambda: not self.cluster.ask("squeue", "-h", "-o", "%A"))
        if self._resumes:
            self.until("nodes that can be resumed", self._are_idle_or_resumed)
        try:
            self.until("idle nodes", lambda: self.cluster.node_states() == ["idle", "idle"])
        except TimeoutError:
            raise _Broken(
                f"nodes are {self.cluster.node_states()}: {self.cluster.ask('sinfo', '-R')}"
            ) from None
        for fate in (self.top / "fates").iterdir():
            fate.unlink()
        if self._sweeps:
            self._sweep()
        try:
            until("the end of all that is left", lambda: not self._left(), _SECONDS)
        except TimeoutError:
            raise _Broken(f"left: {', '.join(self._left())}") from None
        if self._look() != self._seen:
            raise _Broken(f"files of a user without a job were touched: {self._look()}, not {self._seen}")

    def _are_idle_or_resumed(self) -> bool:
        self._resume()
        return self.cluster.node_states() == ["idle", "idle"]

    def _sweep(self) -> None:
        """Run a job on each node, whose prolog ends what killed ones have left."""
        where = self.directory("sweep", self.users[0])
        for node in NODES:
            data = self._directory(where, node, self.users[0])
            job = self.submit(
                self.users[0], where, f"--nodelist={node}", f"--comment=ciuic={data}", lines="true"
            )
            self.until_over(job, "COMPLETED")
            if named := [
                line
                for line in _text(where / "out").splitlines()
                if f"{self.place}/d" in line or f"{self.place}/u" in line
            ]:
                raise _Broken(f"the log of a job names another user's directory: {named}")
            self.until("the epilog", lambda: "idle" in self.cluster.node_states())

    def _left(self) -> list[str]:
        found = [f"mount {os.fsdecode(mount.mount_point)}" for mount in mountinfo.read()
                 if mount.fs_type == b"fuse.ciuic" and os.fsdecode(mount.mount_point).startswith(f"{self.place}/")]  # fmt: skip
        found += ["root in the configuration"] if "[[root]]" in self.live.config.read_text() else []
        found += [f"owed {one}" for one in owed_snapshots(self.live.config)]
        for path in (self.top / "state", self.top / "notes"):
            found += [f"record {one.relative_to(self.top)}" for one in path.rglob("*") if one.is_file()]
        found += [f"state {one}" for one in self.place.rglob(".ciuic-state")]
        for pid, line in self._processes():
            found.append(f"process {pid} {line[:200]}")
        return found

    def _processes(self) -> Iterator[tuple[str, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if f"{self.place}/" in line or (str(self.top) in line and " slurm " in line):
                    yield entry.name, line

    def _look(self) -> list[tuple[str, float, float, int]]:
        places = [self._bystander, self._bystander / "file"]
        return [
            (str(one), one.stat().st_atime, one.stat().st_mtime, one.stat().st_ctime_ns) for one in places
        ]

    def logs(self) -> str:
        """Return the ends of the logs of the story's jobs and of the controller."""
        files = [*self.place.glob("*/out*"), *self.place.glob("*/*.log")]
        texts = [f"{file}: {file.read_text(errors='replace')[-1200:]}" for file in files]
        texts += [
            f"{one.name}: {one.read_text(errors='replace')[-1500:]}"
            for one in sorted((self.top / "slurm").glob("*.log"))
        ]
        return "\n".join([*texts, self.live.log_tail(12)])

    def snapshots(self, job: str) -> list[str]:
        return [one["id"] for one in self.live.json("list", "--tag", f"slurm-job={job}")["snapshots"]]

    def file_of(self, snapshot: str, path: Path) -> str:
        done = self.live.run("cat", snapshot, str(path), expect=None)
        return done.stdout.decode()


class _Training:
    """The shipped job script with a training that waits for its interruptions."""

    def __init__(
        self,
        world: _World,
        name: str,
        steps: int,
        every: int = 0,
        *,
        options: tuple[str, ...] = (),
        script: str = "",
    ) -> None:
        self.world, self.steps = world, steps
        self.uid = world.dice.choice(world.users)
        self.where = world.directory(name, self.uid)
        (self.where / "train.py").write_text(_TRAIN)
        self.options = (f"--export=ALL,STEPS={steps},EVERY={every}", *options)
        shipped = CHECKOUT / "etc/training/slurm.sbatch"
        self.script = self.where / "slurm.sbatch"
        self.script.write_text(script if script else shipped.read_text())
        self.job = self.submit()

    def submit(self) -> str:
        self.job = self.world.submit(self.uid, self.where, *self.options, script=self.script)
        return self.job

    def lines(self, which: str = "") -> list[str]:
        try:
            return (self.where / f"snapshots{which}.d/runs").read_text().splitlines()
        except OSError:
            return []

    def until_run(self, number: int, which: str = "") -> None:
        """Wait for the five steps of a run."""

        def ran() -> bool:
            if len(self.lines(which)) >= 2 * number:
                return True
            if self.world.cluster.state(self.job) in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"):
                raise _Broken(f"job {self.job} is over before run {number}")
            return False

        self.world.until(f"run {number} of job {self.job}", ran)

    def states(self) -> list[int]:
        """Return the steps of the states that are listed: these can be resumed."""
        program = (
            "import sys; from ciuic import SnapshotManager; m = SnapshotManager(sys.argv[1]); "
            "print(*(one.facts.step or 0 for one in m.list_snapshots()))"
        )
        # As the user: root would leave files there that are not the user's.
        done = subprocess.run(
            [self.world.cluster.environment["PATH"].partition(":")[0] + "/python", "-c", program, self.where / "snapshots"],
            user=self.uid, cwd="/", env=self.world.cluster.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return [int(word) for word in done.stdout.split()]

    def finish(self, which: str = "") -> None:
        (self.where / f"snapshots{which}.d/finish").touch()

    def check(self, begins: list[int] | None, which: str = "", seed: int = 0) -> None:
        """Check the result, and the steps at which its runs have begun."""
        begun = [int(line.split()[2]) for line in self.lines(which) if " begins " in line]
        if begins is not None and begun != begins:
            raise _Broken(f"runs began at {begun}, not at {begins}")
        found = (self.where / f"snapshots{which}.d/result").read_text()
        if found != _whole(str(self.world.top), self.steps, seed):
            raise _Broken("the training ended with other bits")


@functools.cache
def _whole(top: str, steps: int, seed: int) -> str:
    """Return the digest of a training that nothing has interrupted."""
    place = Path(top) / f"whole-{steps}-{seed}"
    (place / "snapshots.d").mkdir(parents=True)
    (place / "snapshots.d/finish").touch()
    (place / "train.py").write_text(_TRAIN)
    environment = {
        **os.environ,
        "PYTHONPATH": _PATH,
        "STEPS": str(steps),
        "EVERY": "0",
        "SLURM_ARRAY_TASK_ID": str(seed),
    }
    for name in ("SLURM_NTASKS", "SLURM_PROCID"):
        environment.pop(name, None)
    subprocess.run(
        [sys.executable, "train.py", f"{place}/snapshots"],
        cwd=place,
        env=environment,
        check=True,
        timeout=120,
    )
    return (place / "snapshots.d/result").read_text()


# -- stories


def _preempted(world: _World) -> None:
    times = world.dice.choice([1, 3, 3])
    training = _Training(world, "run", RUN_STEPS * (times + 1))
    for number in range(1, times + 1):
        training.until_run(number)
        world.preempt(training.job)
        world.tell("preemption")
    training.until_run(times + 1)
    training.finish()
    world.until_over(training.job, "COMPLETED")
    training.check([RUN_STEPS * at for at in range(times + 1)])


def _protected_training(world: _World) -> None:
    """A directory that is protected while the training runs in it moves with the job to the other node."""
    training = _Training(world, "run", 3 * RUN_STEPS, options=(f"--comment=ciuic={world.place}/run",))
    for number in (1, 2):
        training.until_run(number)
        if not world.mounted(training.where):
            raise _Broken("the directory is not protected")
        if number == 1:
            if world.dice.random() < 0.4:
                world.kill_daemon()
            world.preempt(training.job)
            world.tell("preemption")
            world.start_daemon()
        elif world.dice.random() < 0.4:
            world.kill_daemon()
    training.until_run(2)
    # The directory is not that which it was before the mount.
    training.finish()
    world.until_over(training.job, "COMPLETED")
    training.check([0, RUN_STEPS], "")


def _limit(world: _World) -> None:
    """Signals of the time limit requeue the job as often as it may be, and then its log says why it ends."""
    real = world.dice.random() < 0.35
    options = ("--time=1", "--signal=B:USR1@50") if real else ()
    script = (
        (CHECKOUT / "etc/training/slurm.sbatch")
        .read_text()
        .replace("--grace 120", "--grace 120 --max-requeues 1")
    )
    training = _Training(world, "run", 3 * RUN_STEPS, options=options, script=script)
    for number in (1, 2):
        training.until_run(number)
        if not real or number == 2:
            world.cluster.ask(
                "scancel", *world.dice.choice([("--batch",), ()]), "--signal=USR1", training.job
            )
        world.tell("time limit" if real and number == 1 else "signal")
        if number == 1:
            world.requeued(training.job)
    world.until_over(training.job, "FAILED")
    if "was started again 1 times: it is not requeued" not in (training.where / "out").read_text():
        raise _Broken("the log does not say why the job is not requeued")
    training.submit()
    training.until_run(3)
    training.finish()
    world.until_over(training.job, "COMPLETED")
    training.check([0, RUN_STEPS, 2 * RUN_STEPS])


def _cancelled(world: _World) -> None:
    """What a user cancels is not requeued, and a job submitted after it resumes."""
    training = _Training(world, "run", 2 * RUN_STEPS, every=2)
    how = world.dice.choice(["job", "job early", "step", "step killed"])
    world.tell(f"scancel of {how}")
    if how == "job early":
        world.until("the start", lambda: world.cluster.state(training.job) == "RUNNING")
        time.sleep(world.dice.uniform(0, 4))
    else:
        training.until_run(1)
    states = training.states()
    words = {"step": (f"{training.job}.0",), "step killed": ("--signal=KILL", f"{training.job}.0")}
    world.cluster.ask("scancel", *words.get(how, (training.job,)))
    state = world.until_over(training.job, *(("FAILED", "CANCELLED") if "step" in how else ("CANCELLED",)))
    if "requeued" in (text := _text(training.where / "out")) and "not requeued" not in text:
        raise _Broken(f"a cancelled job ({state}) was requeued")
    ran = len(training.lines()) // 2
    training.submit()
    training.until_run(ran + 1)
    training.finish()
    world.until_over(training.job, "COMPLETED")
    training.check([0, RUN_STEPS] if how == "step" else None)
    begun = [int(line.split()[2]) for line in training.lines() if " begins " in line]
    if begun[-1] < max([0, *states]):
        raise _Broken(f"runs began at {begun}, although {states} were listed")


def _array(world: _World) -> None:
    """The tasks of an array, from one directory, do not resume each other's states."""
    training = _Training(world, "run", 2 * RUN_STEPS, options=("--array=1-2",))
    array = training.job
    for task in (1, 2):
        training.until_run(1, f"-{task}")
    hit = world.dice.choice([1, 2])
    world.preempt(f"{array}_{hit}")
    world.tell("preemption")
    # A preemption of the node may have hit both.
    for task in (1, 2):
        if world.cluster.state(f"{array}_{task}") == "PENDING":
            world.cluster.start_now(f"{array}_{task}")
    training.job = f"{array}_{hit}"
    training.until_run(2, f"-{hit}")
    for task in (1, 2):
        training.finish(f"-{task}")
    for task in (1, 2):
        world.until_over(f"{array}_{task}", "COMPLETED", "")
        training.check([0, RUN_STEPS] if task == hit else None, f"-{task}", seed=task)


def _tasks(world: _World) -> None:
    """Each task of one srun is told, saves, and resumes."""
    nodes = world.dice.choice([1, 2])
    world.tell(f"nodes {nodes}")
    training = _Training(world, "run", 2 * RUN_STEPS, options=(f"--nodes={nodes}", "--ntasks=2"))
    for rank in "01":
        training.until_run(1, rank)
    if world.dice.random() < 0.5:
        world.preempt(training.job)
        world.tell("preemption")
    else:
        world.cluster.ask("scancel", "--batch", "--signal=USR1", training.job)
        world.requeued(training.job)
        world.tell("signal")
    for rank in "01":
        training.until_run(2, rank)
    for rank in "01":
        training.finish(rank)
    world.until_over(training.job, "COMPLETED")
    for rank in "01":
        training.check([0, RUN_STEPS], rank, seed=10 * int(rank))


def _node(world: _World) -> None:
    """A node is killed while a training runs, or while its job starts, and comes back before or after Slurm has missed it."""
    training = _Training(world, "run", 2 * RUN_STEPS, every=2)
    early = world.dice.random() < 0.3
    if early:
        world.until("the start", lambda: world.cluster.state(training.job) == "RUNNING")
        time.sleep(world.dice.uniform(0, 3))
    else:
        training.until_run(1)
    node = world.cluster.node_of(training.job)
    states = [] if early else training.states()
    world.cluster.kill_node(node)
    world.tell("node killed early" if early else "node killed")
    if world.dice.random() < 0.5:
        world.cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
        world.tell("missed")
    time.sleep(world.dice.uniform(0, 3))
    world.cluster.start_node(node)
    world.requeued(training.job)
    ran = sum(" has " in line for line in training.lines())
    world.until("the next run", lambda: sum(" has " in line for line in training.lines()) > ran)
    training.finish()
    world.until_over(training.job, "COMPLETED")
    training.check(None)
    begun = [int(line.split()[2]) for line in training.lines() if " begins " in line]
    if begun[-1] < max([0, *states]):
        raise _Broken(f"runs began at {begun}, although {states} were listed")
    world._sweeps = True


def _hooks(world: _World) -> None:
    """Jobs of one or two users, on one node or two, with their directories; hooks and the daemon fail around them."""
    dice = world.dice
    both = dice.random() < 0.6
    one_node = dice.random() < 0.6
    same = both and one_node and dice.random() < 0.3
    nodes = [dice.choice(NODES)] * 2 if one_node else list(NODES)
    jobs: list[_Protected] = []
    down = dice.choice(["", "", "", "prolog", "job", "epilog"])
    world.tell(
        f"{'two jobs' if both else 'one job'}{', one directory' if same else ''}{', one node' if both and one_node else ''}"
    )
    if down == "prolog":
        world.live.stop(dice.choice([signal.SIGKILL, signal.SIGTERM]))
        world.tell("no daemon at prolog")
    for at in range(1 + both):
        uid = world.users[0 if same else at]
        where = world.directory(f"u{at}", uid)
        data = world.directory(f"d{at}", uid) if not (same and at) else jobs[0].data
        jobs.append(_Protected(world, uid, nodes[at], where, data, jobs[0].data if at and not same else None))
    for job in jobs:
        job.shares_node = both and one_node
        job.submit()
        if dice.random() < 0.4:
            job.wait_begun()
    for job in jobs:
        job.wait_begun()
    if down == "prolog":
        world.start_daemon()
    elif not any(job.fate != "well" for job in jobs):
        for job in jobs:
            if not world.mounted(job.data):
                raise _Broken(f"{job.data} is not protected while its job runs")
    if down in ("job", "epilog"):
        world.live.stop(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        world.tell(f"no daemon at {down}")
    if down == "job":
        world.start_daemon()
    for job in jobs:
        job.fate_of_epilog()
        job.go()
        world.until_over(job.job, "COMPLETED")
        if same and job is jobs[0] and not down and not world._sweeps and not world.mounted(job.data):
            raise _Broken("the end of one job ends the protection of another's directory")
    world.until("the epilogs", lambda: not world.cluster.ask("squeue", "-h", "-o", "%A"))
    world.start_daemon()
    for job in jobs:
        job.check(down)


class _Protected:
    """A job with a directory that is protected while it runs."""

    def __init__(
        self, world: _World, uid: int, node: str, where: Path, data: Path, theirs: Path | None
    ) -> None:
        self.world, self.uid, self.node, self.where, self.data, self.theirs = (
            world,
            uid,
            node,
            where,
            data,
            theirs,
        )
        self.job = self.fate = self.last_fate = ""
        self.shares_node = False

    def submit(self) -> None:
        self.fate = self.world.fate("prolog", self.node)
        log, go = self.data / f"log-{self.where.name}", self.where / "go"
        lines = [f"echo begun > {log}"]
        if self.theirs:
            lines += [
                f"cat {self.theirs}/* && echo LEAKED",
                f"ciuic slurm snapshot -p {self.theirs} && echo LEAKED",
            ]
        lines += [f"ciuic slurm snapshot -p {self.data}"] if self.world.dice.random() < 0.3 else []
        lines += [
            f"echo ready > {self.where}/ready",
            f"until [ -e {go} ]; do sleep 0.1; done",
            f"echo ended >> {log}",
        ]
        self.job = self.world.submit(
            self.uid, self.where, f"--nodelist={self.node}", f"--comment=ciuic={self.data}",
            f"--export=ALL,CIUIC_CONFIG={self.world.live.config}", lines="\n".join(lines),
        )  # fmt: skip

    def wait_begun(self) -> None:
        def begun() -> bool:
            if self.world._resumes and self.world.cluster.state(self.job) == "PENDING":
                self.world.help_start(self.job)
            return (self.where / "ready").exists()

        self.world.until(f"the start of {self.job}", begun)

    def fate_of_epilog(self) -> None:
        self.last_fate = self.world.fate("epilog", self.node)

    def go(self) -> None:
        (self.where / "go").touch()

    def check(self, down: str) -> None:
        """Check the job's files, its log, and its last snapshot."""
        log, out = self.data / f"log-{self.where.name}", _text(self.where / "out")
        if _text(log) != "begun\nended\n":
            raise _Broken(f"{log} has {_text(log)!r}")
        if "LEAKED" in out:
            raise _Broken(f"a user has read another's files: {out}")
        # Of two jobs on a node either may have met what was meant for one.
        if self.fate in ("missing", "killed", "limit") and not self.shares_node and "ciuic: " not in out:
            raise _Broken("the log of a job does not say that its directory is not protected")
        clean = not self.world._sweeps if self.shares_node else self.fate == self.last_fate == "well"
        if clean and down != "prolog":
            last = (
                self.world.until("the last snapshot", lambda: self.world.snapshots(self.job))
                if down != "epilog"
                else self.world.snapshots(self.job)
            )
            if last and self.world.file_of(last[0], log) != "begun\nended\n":
                raise _Broken("the last snapshot has not the last state")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_STORIES: dict[str, Callable[[_World], None]] = {
    "preempted": _preempted,
    "protected": _protected_training,
    "limit": _limit,
    "cancelled": _cancelled,
    "array": _array,
    "tasks": _tasks,
    "node": _node,
    "hooks": _hooks,
}
