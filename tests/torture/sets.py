"""Sets that four daemons cut over an object store while programs pass messages, with disasters between *ready* and the decision, and at any time.

Judged after each: the snapshots that exist have one id and show one instant; a command that ended well has its snapshot, and one that says
that no host has one is right; a set that lacks a member is told as such; nobody is held for longer than the limit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from support.daemon_hosts import MEMBERS, DaemonHosts
from support.host_networks import INTERFACE, HostNetworks
from support.object_servers import SeaweedFS, weed_program
from support.token_ring import Host, Ring, require_one_instant
from torture.figure import Figure

_AT_READY = ("link", "link", "command", "daemon", "host", "link and command", "clock")
_ANY_TIME = ("link at any time", "uploader", "daemon at any time", "slow daemon", "full disk", "nothing")
_STORE_BYTES = 96 << 20
"""Size of the file system of a host's repository, which a disaster fills."""
# A store behind a link that is down cannot be reached, nor a daemon that was killed.
_MAY_END_WITH = dict.fromkeys(
    ("link", "link and command", "link at any time", "daemon", "host", "daemon at any time"), (5,)
)
# The default limit of a hold, and what a busy machine adds to a write.
_LONGEST_WRITE_SECONDS = 2.0 + 8.0

# Takes part as the command does; when it has said that it is ready, disasters happen, before any decision is read.
_STRUCK_WHEN_READY = """
import os, random, signal, subprocess, sys, time
if os.environ["STRUCK_CLOCK"]:
    off = int(os.environ["STRUCK_CLOCK"])
    seconds, nanoseconds = time.time, time.time_ns
    time.time, time.time_ns = lambda: seconds() + off, lambda: nanoseconds() + off * 10**9
from ciuic.cli import main
from ciuic.remote.objects.obstore_objects import ObstoreObjects
create = ObstoreObjects.create
def struck(self, name, data):
    made = create(self, name, data)
    if "/ready/" in name:
        if os.environ["STRUCK_LINK"]:
            subprocess.run(["ip", "link", "set", os.environ["STRUCK_LINK"], "down"], check=True)
        if os.environ["STRUCK_DAEMON"]:
            os.kill(int(os.environ["STRUCK_DAEMON"]), signal.SIGKILL)
        if os.environ["STRUCK_COMMAND"]:
            os.kill(os.getpid(), signal.SIGKILL)
    return made
ObstoreObjects.create = struck
sys.argv[0] = "ciuic"
main()
"""


class Round(NamedTuple):
    """One attempt to cut a set, and what came of it."""

    disaster: str
    members: int
    """Number of hosts that have a snapshot of the set."""
    longest_seconds: float
    """Longest time that a program's write took."""
    problems: list[str]


class SetsTrial:
    """Sets that are cut one after the other."""

    def __init__(self, daemons: DaemonHosts, networks: HostNetworks, choose: random.Random) -> None:
        self._daemons, self._networks, self._choose = daemons, networks, choose
        self._hosts = daemons.hosts
        self._number = 0

    def strike(self) -> Round:
        """Cut a set while tokens go around, and let a disaster happen; judge."""
        self._number += 1
        name = f"set-{self._number}"
        at = self._choose.randrange(len(self._hosts))
        disaster = self._choose.choice(_AT_READY if self._choose.random() < 0.75 else _ANY_TIME)
        with Ring(self._hosts) as ring:
            commands = [
                host.start(name, "--wait-for", "15s", **self._struck(disaster, number == at, host))
                for number, host in enumerate(self._hosts)
            ]
            with ExitStack() as mending:
                if disaster in _ANY_TIME:
                    time.sleep(self._choose.uniform(0.5, 3.0))
                    self._strike_now(disaster, at, mending)
                time.sleep(self._choose.uniform(1.0, 6.0))
                self._networks.mend(at)
            said = [command.communicate(timeout=150)[1].decode() for command in commands]
            # Before the token comes to it again, as a service manager does.
            self._daemons.revive()
            ring.go_on()
        problems = self._judge(name, disaster, [command.returncode for command in commands], said)
        if ring.longest_seconds > _LONGEST_WRITE_SECONDS:
            problems.append(f"a write took {ring.longest_seconds:.1f} s")
        members = sum(name in host.snapshots() for host in self._hosts)
        return Round(disaster, members, ring.longest_seconds, problems)

    # -- inside

    def _struck(self, disaster: str, here: bool, host: Host) -> dict[str, Any]:
        if not here or disaster not in _AT_READY:
            return {}
        assert host.live.daemon is not None
        variables = {
            "STRUCK_LINK": INTERFACE if "link" in disaster else "",
            "STRUCK_DAEMON": str(host.live.daemon.pid) if disaster in ("daemon", "host") else "",
            "STRUCK_COMMAND": "1" if "command" in disaster or disaster == "host" else "",
            # A day off, in either direction.
            "STRUCK_CLOCK": str(self._choose.choice((-86_400, 86_400))) if disaster == "clock" else "",
        }
        return {"program": (sys.executable, "-c", _STRUCK_WHEN_READY), "variables": variables}

    def _strike_now(self, disaster: str, at: int, mending: ExitStack) -> None:
        host = self._hosts[at]
        if disaster == "link at any time":
            self._networks.cut(at)
        elif disaster == "uploader":
            self._daemons.kill_uploader(at)
        elif disaster == "daemon at any time":
            self._daemons.kill_daemon(at)
        elif disaster == "slow daemon":
            assert host.live.daemon is not None
            host.live.daemon.send_signal(signal.SIGSTOP)
            mending.callback(host.live.daemon.send_signal, signal.SIGCONT)
        elif disaster == "full disk":
            filler = host.live.repository.parent / "filler"
            mending.callback(filler.unlink)
            with open(filler, "wb") as file:
                status = os.statvfs(filler)
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)

    def _judge(self, name: str, disaster: str, codes: list[int], said: list[str]) -> list[str]:
        for host in self._hosts:
            # Commits what was cut before.
            host.live.run("snapshot", "--wait")
        found = [(host, host.snapshots().get(name)) for host in self._hosts]
        have = [(host, snapshot) for host, snapshot in found if snapshot is not None]
        problems = [
            f"{host.name}: the command ended well, and there is no snapshot"
            for (host, snapshot), code in zip(found, codes, strict=True)
            if code == 0 and snapshot is None
        ]
        if have and any("no host is held" in text for text in said):
            problems.append("a command said that no host was held, and the set was cut")
        if len({snapshot.set_member.id for _, snapshot in have if snapshot.set_member is not None}) > 1:
            problems.append("snapshots with one name have several ids")
        if have:
            try:
                require_one_instant([host for host, _ in have], [snapshot for _, snapshot in have])
            except AssertionError as error:
                problems.append(f"not one instant: {error}")
        if len(have) < len(self._hosts) and codes.count(0) == len(codes):
            problems.append("all commands ended well, and the set is not whole")
        expected = {0, 1, 2, 3, -signal.SIGKILL, *_MAY_END_WITH.get(disaster, ())}
        unexpected = [code for code in codes if code not in expected]
        if unexpected:
            problems.append(f"commands ended with {codes}: {said}")
        return problems


def run(seconds: float, seed: int) -> list[Figure]:
    """Run until the time is over, one round at least."""
    if weed_program() is None:
        return [Figure("sets with disasters: no SeaweedFS is offered here", 0)]
    if os.geteuid() or shutil.which("ip") is None:
        return [Figure("sets with disasters: networks of hosts need root and iproute2", 0)]
    top = Path(tempfile.mkdtemp())
    networks = HostNetworks(len(MEMBERS))
    store = SeaweedFS(top / "store", address=networks.address)
    try:
        store.start()
        os.environ.update(store.environment())
        with DaemonHosts(
            top / "daemons", store.new_url(), networks, repository_bytes=_STORE_BYTES
        ) as daemons:
            return _run(daemons, networks, seconds, seed)
    finally:
        store.stop()


def _run(daemons: DaemonHosts, networks: HostNetworks, seconds: float, seed: int) -> list[Figure]:
    until = time.monotonic() + seconds
    rounds: list[Round] = []
    trial = SetsTrial(daemons, networks, random.Random(seed))
    while not rounds or time.monotonic() < until:
        rounds.append(trial.strike())
        sys.stdout.write(f"{rounds[-1]}\n")
        sys.stdout.flush()
    failures = [f"{one.disaster}: {problem}" for one in rounds for problem in one.problems]
    disasters = Counter(one.disaster for one in rounds)
    return [
        Figure("sets of four daemons with disasters", len(rounds), tuple(failures)),
        *(Figure(f"of these: {disaster}", count) for disaster, count in sorted(disasters.items())),
        Figure("of these: whole", sum(one.members == len(MEMBERS) for one in rounds)),
        Figure("of these: none", sum(one.members == 0 for one in rounds)),
        Figure(
            "of these: cut where a host was lost after it was ready",
            sum(0 < one.members < len(MEMBERS) for one in rounds),
        ),
        Figure("longest write in milliseconds", round(1000 * max(one.longest_seconds for one in rounds))),
    ]
