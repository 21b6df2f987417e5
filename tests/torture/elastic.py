"""Elastic trainings under torchrun on hosts of their own, and disasters: ranks, agents and hosts are killed, hang, are preempted, and come back.

Two hosts (tests/support/elastic_hosts.py), each with an agent of `torchrun --nnodes=1:2`, and no third: torchrun's agents would restart each other
(docs/snapshot-manager.md, "Elastic jobs"). FSDP2 and DDP in turn save to the disks of the hosts and to a remote, a SeaweedFS or a directory. After each disaster the training must be beyond the step that it
had reached within a stated time; each run must end with the bits of an undisturbed one; and at its end the hosts that are left have
nothing but their disks: no process, no mount, no temporary file, nothing in shared memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

from support import elastic_hosts, metadata_service
from support.elastic_hosts import ElasticHost, Event, read_events
from support.host_networks import INTERFACE, HostNetworks
from support.object_servers import SeaweedFS, environment_for_s3, weed_program
from support.until import until
from torture.figure import Figure

from ciuic.remote.sealing.key_slots import make_key_file

_HOSTS = 2
_STEPS = 400
_STEP_SECONDS = 0.1
_DISASTERS_A_RUN = 12
_MIN_DISASTERS = 3
_PROGRAM = Path(__file__).parents[1] / "support/elastic_training.py"
PROGRESS_SECONDS: Final = 60.0
"""Within which a training is beyond the step that it had reached before a disaster."""
_HANG_SECONDS: Final = 40.0
"""That come on top where a rank hangs: a collective's timeout, and the 30 that torchrun waits before it kills what does not answer SIGTERM."""
_NOTICE_SECONDS = 8.0
_END_SECONDS = 90.0
_KINDS = ("fsdp", "ddp")
_DISASTERS = ("rank", "rank", "ranks", "agent", "agent", "host", "host", "reboot", "hang", "notice")


class _Notices:
    """Metadata services of the hosts."""

    def __init__(self) -> None:
        self.told: dict[int, str] = {}
        """What the service of a host has to say."""

    @contextmanager
    def serve(self, at: int, address: str) -> Iterator[str]:
        def answer(_method: str, path: str, _headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
            if path == "/latest/api/token":
                return 200, "token", {}
            told = self.told.get(at) if path.endswith("instance-action") else None
            return (200, told, {}) if told else (404, "", {})

        with metadata_service.service(answer, address) as url:
            yield url

    def tell(self, at: int, seconds: float) -> None:
        when = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        self.told[at] = json.dumps({"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")})


class ElasticTrial:
    """One run of a training, and its hosts."""

    def __init__(
        self,
        top: Path,
        kind: str,
        choose: random.Random,
        networks: HostNetworks,
        url: str,
        environment: dict[str, str],
    ) -> None:
        from torch import distributed

        self._top, self._kind, self._choose, self._networks, self._url = top, kind, choose, networks, url
        top.mkdir()
        self._events, self._pace, self._key = top / "events", top / "pace", top / "key"
        self._events.touch()
        self._set_pace(_STEP_SECONDS)
        make_key_file(str(self._key))
        # Where agents find each other: a host's own would be lost with it.
        self._meeting = distributed.TCPStore(networks.address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined, unused-ignore]
        self._environment = {
            **os.environ,
            **environment,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._stack = ExitStack()
        self._notices = _Notices()
        self._metadata = [
            self._stack.enter_context(self._notices.serve(at, networks.address)) for at in range(_HOSTS)
        ]
        self.hosts: dict[int, ElasticHost] = {}
        self.problems: list[str] = []
        self.disasters: Counter[str] = Counter()
        self.seconds: list[tuple[float, str]] = []
        self.lost: list[int] = []

    def _set_pace(self, seconds: float) -> None:
        new = self._pace.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._pace)

    def _program(self, save_dir: Path, events: Path, kind: str, pace: Path, *remote: str) -> list[str]:
        return [str(_PROGRAM), str(save_dir), str(_STEPS), str(events), kind, str(pace), *remote]

    def undisturbed(self) -> str:
        """Return the digest of an undisturbed run in one process."""
        place = self._top / "undisturbed"
        place.mkdir()
        (place / "pace").write_text("0")
        own = {"XDG_CACHE_HOME": str(place), "XDG_STATE_HOME": str(place)}
        program = self._program(place / "snapshots", place / "events", "plain", place / "pace")
        subprocess.run(
            [sys.executable, *program], check=True, cwd="/", env={**self._environment, **own}, timeout=300
        )
        return read_events(place / "events")[-1].value

    def _start_host(self, at: int) -> None:
        self.hosts[at] = ElasticHost(at, self._networks, self._top / "disk", self._top / f"host-{at}.log")
        self._start_agent(at)

    def _start_agent(self, at: int) -> None:
        rendezvous = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        host = self.hosts[at]
        agent = [
            sys.executable,
            "-m",
            elastic_hosts.AGENT,
            "--nnodes=1:2",
            "--nproc-per-node=1",
            f"--max-restarts={os.environ.get('CIUIC_ELASTIC_RESTARTS', '100')}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._networks.address}:{self._meeting.port}",
            "--rdzv-id=elastic",
            f"--rdzv-conf={rendezvous}",
            f"--local-addr={self._networks.addresses[at]}",
            "--monitor-interval=0.2",
            *self._program(host.disk / "snapshots", self._events, self._kind, self._pace),
            self._url,
            str(self._key),
            self._metadata[at],
        ]
        host.start(agent, self._environment)

    def begin(self) -> None:
        """Start all hosts; return when there is something on the remote to go on from."""
        (self._top / "disk").mkdir()
        for at in range(_HOSTS):
            self._start_host(at)
        # Of DDP the host of rank 0 alone stores.
        storing = {0, 1} if self._kind == "fsdp" else {0}
        until("a state on the remote", lambda: {event.rank for event in self._told("stored")} >= storing, 120)

    @property
    def ended(self) -> bool:
        """Whether the training has come to its end."""
        return bool(self._told("digest"))

    def _told(self, word: str, after: int = 0) -> list[Event]:
        return [event for event in read_events(self._events, after) if event.word == word]

    def _reached(self) -> int:
        return max((int(event.value) for event in self._told("step")), default=0)

    def strike(self) -> None:
        """Let a disaster happen, or two in a row, and wait until the training is beyond where it was."""
        time.sleep(self._choose.uniform(0.0, 4.0))
        kinds = [self._disaster()]
        if self._choose.random() < 0.5:
            time.sleep(self._choose.uniform(0.0, 8.0))
            kinds.append(self._disaster())
        # What was the last of them decides since when there must be progress.
        what = " and ".join(kind for kind, _, _ in kinds)
        _, offset, reached = kinds[-1]
        limit = PROGRESS_SECONDS + _HANG_SECONDS * ("hang" in what)
        began = time.monotonic()
        try:
            until("progress", lambda: self._progressed(offset, reached), limit)
        except TimeoutError:
            self.problems.append(
                f"no progress beyond step {reached} within {limit:.0f} s of {what}\n{self._logs()}"
            )
            # Whether it is late or stuck.
            until("any progress", lambda: self._progressed(offset, reached), 180)
        self.seconds.append((time.monotonic() - began, what))
        if not self.ended:
            first = int(self._told("began", offset)[0].value)
            self.lost.append(max(0, reached - first))
            sys.stdout.write(f"  {what}: {self.seconds[-1][0]:.1f} s, step {reached} -> {first}\n")
            sys.stdout.flush()
        for at, host in self.hosts.items():
            if host.status() is not None and not self.ended:
                self.problems.append(
                    f"the agent of host {at} ended with {host.status()} after {what}\n{host.log()}"
                )
                self._start_agent(at)
        for at in set(range(_HOSTS)) - self.hosts.keys():
            # At some later disaster's time it may still be absent.
            if self._choose.random() < 0.7:
                self.disasters["a host that comes back"] += 1
                self._start_host(at)

    def _progressed(self, offset: int, reached: int) -> bool:
        told = read_events(self._events, offset)
        begins = [at for at, event in enumerate(told) if event.word == "began"]
        return self.ended or bool(
            begins and any(event.word == "step" and int(event.value) > reached for event in told[begins[0] :])
        )

    def _disaster(self) -> tuple[str, int, int]:
        """Let one happen; return its kind, the length of the events at that moment, and the step that was reached."""
        kind = self._choose.choice(_DISASTERS)
        training = [at for at, host in sorted(self.hosts.items()) if host.ranks()]
        if (kind in ("host", "notice") and len(self.hosts) < 2) or (kind == "hang" and len(training) < 2):
            # Nobody would notice, or nobody be left.
            kind = "rank"
        victim = self._choose.choice(training or sorted(self.hosts))
        host = self.hosts[victim]
        reached, offset = self._reached(), self._events.stat().st_size
        if kind == "notice":
            self._notices.tell(victim, _NOTICE_SECONDS)
            time.sleep(_NOTICE_SECONDS)
        if kind in ("host", "notice"):
            told = reached
            reached, offset = self._reached(), self._events.stat().st_size
            host.destroy()
            self._notices.told.pop(victim, None)
            del self.hosts[victim]
            if kind == "notice" and reached > told:
                # Ranks that hang or only begin have no boundary at which to save.
                self._check_notice(told, offset)
        elif kind == "hang":
            host.signal(host.ranks(), signal.SIGSTOP)
        elif kind in ("agent", "reboot"):
            host.signal(list(host.processes("" if kind == "reboot" else elastic_hosts.AGENT)), signal.SIGKILL)
            host.wait(30)
            time.sleep(self._choose.uniform(0.0, 3.0))
            offset = self._events.stat().st_size
            reached = self._reached()
            self._start_agent(victim)
        else:
            for one in [host] if kind == "rank" else list(self.hosts.values()):
                one.signal(one.ranks(), signal.SIGKILL)
        self.disasters[kind] += 1
        return kind, offset, reached

    def _check_notice(self, told: int, offset: int) -> None:
        """Check that a run that had notice of its end has lost no step from before."""
        until("a round after a notice", lambda: self.ended or self._told("began", offset), PROGRESS_SECONDS)
        begun = self._told("began", offset)
        if begun and int(begun[0].value) < told:
            self.problems.append(f"notice at step {told}, resumed at {begun[0].value}\n{self._logs()}")

    def finished(self) -> str:
        """Run to the end; return the digest, which all ranks must have in common, and check that nothing is left."""
        self._set_pace(0.0)
        until("the end of the training", lambda: self.ended, 240)
        sys.stdout.write("  the training has ended\n")
        sys.stdout.flush()
        for at, host in self.hosts.items():
            if status := host.wait(_END_SECONDS):
                self.problems.append(f"the agent of host {at} ended with {status}\n{host.log()}")
            try:
                until("the end of all", partial(_is_clear, host), _END_SECONDS)
            except TimeoutError:
                self.problems.append(f"host {at} is left with {host.left()}")
        digests = {event.value for event in self._told("digest")}
        return digests.pop() if len(digests) == 1 else f"ranks differ: {digests}"

    def _logs(self) -> str:
        return "\n".join(f"--- host {at}\n{host.log()}" for at, host in self.hosts.items())

    def close(self) -> None:
        """End everything that runs."""
        for host in self.hosts.values():
            host.destroy()
        self._stack.close()


def _is_clear(host: ElasticHost) -> bool:
    host.hurry()
    return not host.left()


def run(seconds: float, seed: int) -> list[Figure]:
    """Run until the time is over, one training at least."""
    if importlib.util.find_spec("torch") is None:
        return [Figure("disasters under torchrun: no CPU build of PyTorch is offered here", 0)]
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return [Figure("disasters under torchrun: hosts need root, iproute2 and util-linux", 0)]
    top = Path(tempfile.mkdtemp())
    networks = HostNetworks(_HOSTS)
    store = SeaweedFS(top / "store", address=networks.address) if weed_program() else None
    try:
        if store is not None:
            store.start()
        return _run(top, store, networks, seconds, seed)
    finally:
        if store is not None:
            store.stop()


def _run(
    top: Path, store: SeaweedFS | None, networks: HostNetworks, seconds: float, seed: int
) -> list[Figure]:
    choose = random.Random(seed)
    end = time.monotonic() + seconds
    runs, disasters, failures = 0, Counter[str](), []
    times: list[tuple[float, str]] = []
    lost: list[int] = []
    while not runs or time.monotonic() < end:
        kind = _KINDS[(seed + runs) % len(_KINDS)]
        what = f"run {runs} of seed {seed}, {kind}"
        environment: dict[str, Any] = environment_for_s3(store.endpoint) if store is not None else {}
        directory = top / f"nas-{runs}"
        url = store.new_url() if store is not None else f"file://{directory}"
        trial = ElasticTrial(top / str(runs), kind, choose, networks, url, environment)
        try:
            expected = trial.undisturbed()
            trial.begin()
            while not trial.ended and trial.disasters.total() < (
                _DISASTERS_A_RUN if time.monotonic() < end else _MIN_DISASTERS
            ):
                trial.strike()
            if trial.finished() != expected:
                failures.append(f"{what} ended with other bits")
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            failures.append(f"{what}: {error}\n{trial._logs()}")
        finally:
            trial.close()
        failures += [f"{what}: {problem}" for problem in trial.problems]
        disasters += trial.disasters
        times += trial.seconds
        lost += trial.lost
        runs += 1
    hung = [took for took, of in times if "hang" in of]
    others = [took for took, of in times if "hang" not in of]
    return [
        Figure("disasters of trainings under torchrun", disasters.total()),
        *(Figure(f"of these: {kind}", count) for kind, count in sorted(disasters.items())),
        Figure(
            "longest time in seconds until the training was beyond where it had been",
            round(max(others, default=0)),
        ),
        Figure("the same where a rank hung", round(max(hung, default=0))),
        Figure("largest loss in steps", max(lost, default=0)),
        Figure(
            "such runs that went on in time and ended with the bits of an undisturbed one",
            runs,
            tuple(failures),
        ),
    ]
