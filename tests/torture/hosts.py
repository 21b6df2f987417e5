"""Trainings over hosts of their own, with an object store, and disasters: ranks, writers, uploads, links and whole hosts are lost.

Two or four ranks of a sharded or DDP training, each on a host with a network and a directory of its own, save to it and to a SeaweedFS. After each
disaster a model looks at what is left, in the directories and on the remote: which states are whole. The next start must resume the newest of
them or, where an upload that went on has completed a newer one, that; where sets are left and none is whole, it must say so.
Where no host was lost, it must not lose what the training was told is saved. Every run that ends must end with the bits of an undisturbed one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support import leftovers
from support.daemon_hosts import DaemonHosts
from support.host_networks import HostNetworks
from support.object_servers import SeaweedFS, weed_program
from support.until import until
from torture.figure import Figure

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.training.remote.copies import RemoteTraining
from ciuic.types import ChunkId, SetMember, Snapshot, SnapshotId

_DISASTERS_A_RUN = 8
_STEP_SECONDS = 0.05
_EVERY_STEPS = 5
_STEPS = 120
_ROOT = b"/training"
_MAX_HOSTS = 4
_CUT_SECONDS = (0.3, 6.0)
_GLOO_SECONDS = 12.0


class Kind(NamedTuple):
    """A kind of training."""

    sharded: bool
    world: int
    files: bool = False
    """The daemon of each host makes a snapshot of the files of each save."""

    @property
    def epochs(self) -> int:
        """Number of passes over its data that are so many steps."""
        return _STEPS // (12 if self.sharded else 16 // self.world)

    def __str__(self) -> str:
        files = " with files" if self.files else ""
        return f"{'FSDP2' if self.sharded else 'DDP'} over {self.world} hosts{files}"


_KINDS = (Kind(True, 4), Kind(False, 4, True), Kind(True, 2, True), Kind(False, 2))


class Strike(NamedTuple):
    """A disaster, and what came of the one before."""

    kind: str
    problems: list[str]
    lost_steps: int | None
    """Steps that were made before the disaster and lie after the newest state that is whole; None: the run ended without loss, or had not begun."""


class Whole(NamedTuple):
    """What is left of the snapshots of a training."""

    newest_step: int | None
    """Step of the newest set of which each member is left."""
    any_set: bool


class HostsTrial:
    """A training over hosts that is struck again and again."""

    def __init__(
        self,
        place: Path,
        kind: Kind,
        choose: random.Random,
        store: SeaweedFS,
        networks: HostNetworks,
        daemons: DaemonHosts,
    ) -> None:
        from support.ranks_apart import prepare_remote

        self._place, self._kind, self._choose, self._networks = place, kind, choose, networks
        self._daemons = daemons
        self._judged: set[str] = set()
        self.pairs = 0
        """Snapshots of files that were compared with what the training had written at the boundary."""
        self._world = kind.world
        self._number = 0
        (place / "struck").mkdir(parents=True)
        self._remote = prepare_remote(place / "struck", store.new_url())
        for rank, host in enumerate(daemons.hosts[: self._world] if kind.files else ()):
            (host.root / place.name).mkdir()
            (self._struck / f"files-{rank}").symlink_to(host.root / place.name)

    def undisturbed(self) -> list[dict[str, Any]]:
        """Return the results of an undisturbed run without a remote, by rank."""
        (self._place / "whole").mkdir()
        return self._finish("whole")

    def finished(self) -> list[dict[str, Any]]:
        """Run the struck training to its end; return its results."""
        return self._finish("struck")

    @property
    def ended(self) -> bool:
        """Whether the struck training has come to its end by itself."""
        return all((self._struck / f"result-{rank}").exists() for rank in range(self._world))

    def strike(self) -> Strike:
        """Start the run, let a disaster happen, and judge."""
        before = self.left()
        for rank in range(self._world):
            for name in ("resumed", "step", "told"):
                (self._struck / f"{name}-{rank}").unlink(missing_ok=True)
        ranks = self._begin("struck", _STEP_SECONDS)
        kinds = ["rank", "all", "writer", "upload", "host", "host", "link", "link"]
        kind = self._choose.choice([*kinds, *(["daemon", "daemon", "uploader"] if self._kind.files else [])])
        # Not before the ranks have resumed, which is checked.
        began = time.monotonic()
        while (
            len(self._told("resumed")) < self._world
            and time.monotonic() - began < 60
            and any(p.is_alive() for p in ranks.processes)
        ):
            time.sleep(0.05)
        time.sleep(self._choose.uniform(0.0, 4.0))
        self._disaster(kind, self._choose.randrange(self._world), ranks)
        # A program that writes to a root may wait for its daemon.
        self._daemons.revive()
        ranks.wait()
        until("end of the writers", lambda: not _living("writer_process"))
        problems = self._problems(before, "\n".join(ranks.log_of(rank) for rank in range(self._world)))
        after = self.left()
        if kind not in ("host", "writer") and (saved := self._saved()) > (after.newest_step or 0):
            problems.append(f"step {saved} was said to be saved, and {after.newest_step} is the newest left")
        problems += self._problems_of_files()
        reached = max(self._told("step"), default=None)
        lost = None if reached is None or self.ended else max(0, reached - (after.newest_step or 0))
        return Strike(kind, problems, lost)

    def _disaster(self, kind: str, victim: int, ranks: Any) -> None:
        if kind == "rank":
            ranks.kill(victim)
        elif kind == "all":
            ranks.kill(*range(self._world))
        elif kind == "host":
            ranks.kill(victim)
            if self._kind.files:
                self._daemons.kill_daemon(victim)
                self._daemons.kill_uploader(victim)
            for pid in _processes_of(self._host(victim)):
                _kill(pid)
            shutil.rmtree(self._host(victim), ignore_errors=True)
        elif kind in ("daemon", "uploader"):
            if kind == "daemon":
                self._daemons.kill_daemon(victim)
            else:
                self._daemons.kill_uploader(victim)
            time.sleep(self._choose.uniform(0.0, 3.0))
            ranks.kill(*range(self._world))
        elif kind == "link":
            self._networks.cut(victim)
            outcome = self._choose.choice(("goes on", "goes on", "killed meanwhile", "time-out"))
            if outcome == "time-out":
                ranks.wait(3 * _GLOO_SECONDS)
            else:
                time.sleep(self._choose.uniform(*_CUT_SECONDS))
            if outcome == "killed meanwhile":
                ranks.kill(*range(self._world))
            self._networks.mend(victim)
            if outcome == "goes on":
                time.sleep(self._choose.uniform(0.0, 2.0))
                ranks.kill(*range(self._world))
        else:
            for pid in _processes_of(
                self._struck / "snapshots", "writer_process" if kind == "writer" else "upload_process"
            ):
                if self._choose.random() < 0.6:
                    _kill(pid)
            time.sleep(self._choose.uniform(0.0, 2.0))
            ranks.kill(*range(self._world))

    def left(self) -> Whole:
        """Return what is left, by looking at every snapshot in every directory and on the remote."""
        found: dict[str, tuple[int, int, set[str], tuple[str, ...]]] = {}
        for time_ns, snapshot in self._snapshots():
            step = _step_of(snapshot)
            # A state that is one snapshot is whole by itself.
            member = snapshot.set_member or SetMember(id=str(snapshot.id), name="", member="", members=("",))
            newest, _, names, _ = found.setdefault(member.id, (time_ns, step, set(), member.members))
            names.add(member.member)
            found[member.id] = max(newest, time_ns), step, names, member.members
        whole = [(time_ns, step) for time_ns, step, names, members in found.values() if names == set(members)]
        return Whole(max(whole)[1] if whole else None, bool(found))

    # -- inside

    @property
    def _struck(self) -> Path:
        return self._place / "struck"

    def _host(self, rank: int) -> Path:
        return self._struck / "snapshots" / str(rank)

    def _snapshots(self) -> Iterator[tuple[int, Snapshot]]:
        for rank in range(self._world):
            if Repository.exists(self._host(rank)):
                with Repository.open(self._host(rank)) as repository:
                    for info in repository.snapshots.list(root=_ROOT):
                        yield info.order_ns, repository.snapshots.load(info.id)
        with RemoteTraining([self._remote], _ROOT) as training, suppress(CiuicError):
            for one in training.candidates():
                with training.opener(one)() as repository, suppress(CiuicError):
                    yield one.time_ns, repository.snapshots.load(SnapshotId(one.id))

    def _problems_of_files(self) -> list[str]:
        """Compare the files' snapshots that are new with what the training had written at their boundaries."""
        from support.ranks_apart import file_of_step

        problems = []
        for rank, host in enumerate(self._daemons.hosts[: self._world] if self._kind.files else ()):
            if not Repository.exists(self._host(rank)):
                continue
            with Repository.open(self._host(rank)) as states, Repository.open(host.live.repository) as files:
                known = {str(info.id) for info in files.snapshots.list()}
                for info in states.snapshots.list(root=_ROOT):
                    state = states.snapshots.load(info.id)
                    if state.pair is None or state.pair.id not in known or state.pair.id in self._judged:
                        continue
                    self._judged.add(state.pair.id)
                    self.pairs += 1
                    snapshot = files.snapshots.load(SnapshotId(state.pair.id))
                    directory = files.trees.entry(snapshot.roots[0].entry.content, self._place.name.encode())
                    for step in range(1, _step_of(state) + 1):
                        entry = directory and files.trees.entry(directory.content, b"step-%d" % step)
                        wanted = file_of_step(rank, step)
                        if (
                            not entry
                            or files.chunks.get(ChunkId(entry.content))[: entry.size_bytes] != wanted
                        ):
                            problems.append(f"the files of step {_step_of(state)} lack those of step {step}")
        return problems

    def _told(self, name: str) -> list[Any]:
        """Return what ranks have said under a name."""
        paths = [self._struck / f"{name}-{rank}" for rank in range(self._world)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def _saved(self) -> int:
        """Return the newest step of which rank 0, which alone is told, was told that it is saved on its host."""
        return max((max(one) for one in self._told("told")), default=0)

    def _problems(self, before: Whole, log: str) -> list[str]:
        steps = self._told("resumed")
        if before.any_set and before.newest_step is None:
            return (
                []
                if "no snapshot can be read whole" in log
                else ["sets are left, none is whole, and nothing said so"]
            )
        if len(steps) < self._world:
            return [f"the ranks did not resume: {log[-1500:]}"]
        if len(set(steps)) > 1 or steps[0] < (before.newest_step or 0):
            return [f"the ranks resumed at {steps}, where step {before.newest_step} was whole"]
        return []

    def _finish(self, which: str) -> list[dict[str, Any]]:
        self._begin(which, 0.0).check()
        return [
            json.loads((self._place / which / f"result-{rank}").read_text()) for rank in range(self._world)
        ]

    def _begin(self, which: str, step_seconds: float) -> Any:
        from support import ranks_apart
        from support.sharded_training import Ranks

        self._number += 1
        where = self._place / which
        logs = self._place / f"logs-{self._number}"
        train = partial(ranks_apart.train_apart, every_steps=_EVERY_STEPS)
        arguments = (str(where / "snapshots"), str(where / "result"), step_seconds)
        return Ranks(
            logs,
            self._world,
            train,
            *arguments,
            self._kind.epochs,
            self._kind.sharded,
            [str(host.live.config) for host in self._daemons.hosts]
            if self._kind.files and which == "struck"
            else (),
            timeout_seconds=_GLOO_SECONDS,
            networks=self._networks,
        )


def _step_of(snapshot: Snapshot) -> int:
    return int(re.findall(r"\bstep (\d+)", snapshot.message)[-1])


def _living(word: str) -> list[int]:
    """Return the processes that killed ranks have left, which this one has adopted."""
    return [pid for pid, command in leftovers.living_children().items() if word in command]


def _processes_of(directory: Path, word: str = "") -> list[int]:
    """Return the processes below this one that have a directory in their command or environment."""
    found = []
    for pid in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            text = Path(f"/proc/{int(pid)}/cmdline").read_bytes()
            if (
                word.encode() in text
                and str(directory).encode() in text + Path(f"/proc/{pid}/environ").read_bytes()
            ):
                found.append(int(pid))
    return [pid for pid in found if pid != os.getpid()]


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def run(seconds: float, seed: int) -> list[Figure]:
    """Run until the time is over, one training over each number of hosts at least."""
    if importlib.util.find_spec("torch") is None:
        return [Figure("disasters of hosts: no CPU build of PyTorch is offered here", 0)]
    if weed_program() is None:
        return [Figure("disasters of hosts: no SeaweedFS is offered here", 0)]
    if os.geteuid() or shutil.which("ip") is None:
        return [Figure("disasters of hosts: their networks need root and iproute2", 0)]
    top = Path(tempfile.mkdtemp())
    networks = HostNetworks(_MAX_HOSTS)
    store = SeaweedFS(top / "store", address=networks.address)
    try:
        store.start()
        os.environ.update(store.environment())
        with DaemonHosts(top / "daemons", store.new_url(), networks) as daemons:
            return _run(top, store, networks, daemons, seconds, seed)
    finally:
        store.stop()


def _run(
    top: Path, store: SeaweedFS, networks: HostNetworks, daemons: DaemonHosts, seconds: float, seed: int
) -> list[Figure]:
    choose = random.Random(seed)
    until = time.monotonic() + seconds
    expected: dict[Kind, list[dict[str, Any]]] = {}
    kinds: Counter[str] = Counter()
    lost: list[int] = []
    runs = none_whole = pairs = 0
    failures: list[str] = []
    while runs < len(_KINDS) or time.monotonic() < until:
        kind = _KINDS[runs % len(_KINDS)]
        what = f"run {runs} of seed {seed}, {kind}"
        trial = HostsTrial(top / str(runs), kind, choose, store, networks, daemons)
        try:
            if kind not in expected:
                expected[kind] = trial.undisturbed()
            for _ in range(_DISASTERS_A_RUN):
                strike = trial.strike()
                kinds[strike.kind] += 1
                sys.stdout.write(f"{what}: {strike}\n")
                sys.stdout.flush()
                lost += [] if strike.lost_steps is None else [strike.lost_steps]
                failures += [f"{what}, {strike.kind}: {problem}" for problem in strike.problems]
                left = trial.left()
                if trial.ended or (left.any_set and left.newest_step is None):
                    break
            left = trial.left()
            if left.any_set and left.newest_step is None:
                # Lost before any set was uploaded: an operator begins anew.
                none_whole += 1
            elif trial.finished() != expected[kind]:
                failures.append(f"{what} ended with other bits")
        except AssertionError as error:
            failures.append(f"{what} did not end: {error}")
        runs += 1
        pairs += trial.pairs
        until("end of the uploads", lambda: not _living("upload_process"))
        # An upload that lost its host ends when it sees that.
        shutil.rmtree(top / str(runs - 1), ignore_errors=True)
    within = sum(one <= _EVERY_STEPS for one in lost)
    return [
        Figure("disasters of trainings over hosts", kinds.total()),
        *(Figure(f"of these: {kind}", count) for kind, count in sorted(kinds.items())),
        Figure(f"of these: lost at most one interval of {_EVERY_STEPS} steps", within),
        Figure(
            "of these: lost more: it was being stored or uploaded, or the writers were busy",
            len(lost) - within,
        ),
        Figure("snapshots of files that had all that was written at the boundary", pairs),
        Figure("largest loss in steps", max(lost, default=0)),
        Figure("runs that lost a host before anything was uploaded, and said so", none_whole),
        Figure("such runs that resumed the newest whole set each time, to the bit", runs, tuple(failures)),
    ]
