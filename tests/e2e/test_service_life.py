"""The service under a real systemd, with a job in its root that checks every write and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import wheels
from support.ci import needs
from support.real_systemd import RealSystemd, reason_against
from support.service_host import CODE, ServiceHost
from support.two_versions import OLD_COMMIT, OLD_VERSION
from support.until import until

pytestmark = [pytest.mark.mount, pytest.mark.slow]

_OLDER = "7b77f7c"
"""First version that was tried outside: its workers run in the daemon's control group."""
_WATCHDOG = "[Service]\nWatchdogSec=4\n"
"""Watchdog time of both services, shortened; a busy machine keeps an event loop waiting for a second."""
_SCRUB_SECONDS = 300.0
"""Upper limit of a scrub, which gives way to any other use of the disk."""


@pytest.fixture
def host(short_tmp: Path) -> Iterator[ServiceHost]:
    needs(reason_against())
    top = short_tmp / "srv"
    top.mkdir()
    with RealSystemd(short_tmp, [CODE, top]) as systemd:
        yield ServiceHost(systemd, str(top))


def test_the_job_survives_failures_of_the_service(host: ServiceHost) -> None:
    """The job has no failure under restarts, kills of daemon and worker, hangs, stops and a scrub."""
    root = host.install()
    with host.job() as job:
        for unit in ("ciuic.service", "ciuic-workers.service"):
            host.drop_in(unit, _WATCHDOG)
        _restart(host)
        job.goes_on()
        _hang(host)
        job.goes_on()
        if root["driver"] == "kernel":
            _hang_the_forking_process(host)
            job.goes_on()
        for unit in ("ciuic.service", "ciuic-workers.service"):
            host.drop_in(unit, "")
        _kill_the_daemon(host)
        job.goes_on()
        if root["driver"] == "kernel":
            _kill_all_of_it(host)
            job.goes_on()
        _scrub(host)
    with host.job(1, mounts_change=True) as job:
        for command in ("ciuic", "systemctl"):
            _stop_and_start(host, command)
            job.goes_on()
        host.ciuic("snapshot", "--wait")
    host.ciuic("verify", "--all", "--checksum")
    host.ciuic("service", "uninstall")
    assert "fuse.ciuic" not in host("cat", "/proc/1/mountinfo")


def _restart(host: ServiceHost) -> None:
    """Restart: the workers live on and are adopted with their sessions; the forking process is a new one."""
    before, forks, root = host.main_pid(), host.main_pid("ciuic-workers.service"), host.root()
    host("systemctl", "restart", "ciuic.service")
    host.another_daemon(before)
    after = host.root()
    assert (after["worker_pid"], after["session"]) == (root["worker_pid"], root["session"])
    assert host.main_pid("ciuic-workers.service") != forks


def _kill_the_daemon(host: ServiceHost) -> None:
    """Kill the daemon: systemd restarts it within seconds, and commands wait on the stored socket."""
    before, root = host.main_pid(), host.root()
    host("kill", "-KILL", str(before))
    # Sent at once: the answer comes from the successor.
    assert host.status()["pid"] != before
    host.another_daemon(before)
    assert host.root()["session"] == root["session"]


def _kill_all_of_it(host: ServiceHost) -> None:
    """Kill daemon, forking process and worker: systemd holds the kernel connection, and nothing is lost."""
    before, worker = host.main_pid(), host.root()["worker_pid"]
    kept = int(host.shown("ciuic.service", "NFileDescriptorStore"))
    # The control socket; the session and the directory of the one root.
    assert kept == 3
    host("kill", "-KILL", str(before), str(host.main_pid("ciuic-workers.service")), str(worker))
    host.another_daemon(before)
    assert host.root()["worker_pid"] != worker
    assert int(host.shown("ciuic.service", "NFileDescriptorStore")) == kept


def _hang(host: ServiceHost) -> None:
    """Stop the daemon with SIGSTOP: the watchdog ends it and systemd starts it again."""
    before = host.main_pid()
    host("kill", "-STOP", str(before))
    host.another_daemon(before)


def _hang_the_forking_process(host: ServiceHost) -> None:
    """Kill a worker while the process that forks its successor hangs: that process is ended and replaced."""
    forks, worker = host.main_pid("ciuic-workers.service"), host.root()["worker_pid"]
    host("kill", "-STOP", str(forks))
    host("kill", "-KILL", str(worker))
    until("a successor", lambda: host.root().get("worker_pid") not in (None, 0, worker))
    assert host.main_pid("ciuic-workers.service") != forks
    host.mounted()


def _scrub(host: ServiceHost) -> None:
    """Check that the timer is set, and that the service it starts reads the repository through."""
    host.ciuic("snapshot", "--wait")
    assert host.shown("ciuic-scrub.timer", "NextElapseUSecRealtime")
    host("systemctl", "start", "--no-block", "ciuic-scrub.service")
    ended = ("inactive", "failed")
    until("its end", lambda: host.shown("ciuic-scrub.service", "ActiveState") in ended, _SCRUB_SECONDS)
    assert host.shown("ciuic-scrub.service", "Result") == "success", host.journal()
    assert "every byte that was read is right" in host.journal()


def _stop_and_start(host: ServiceHost, program: str) -> None:
    """Stop by either command: the job is in the root, which is served on, and the next daemon goes on with its session."""
    root = host.root()
    if program == "ciuic":
        host.ciuic("stop")
    else:
        host("systemctl", "stop", "ciuic.service")
    until("the end", lambda: host.shown("ciuic.service", "ActiveState") == "inactive")
    assert host.shown("ciuic.service", "Result") == "success"
    assert "fuse.ciuic" in host("cat", "/proc/1/mountinfo")
    host("systemctl", "start", "ciuic.service")
    after = host.mounted()
    assert (after["worker_pid"], after["session"]) == (root["worker_pid"], root["session"])


@pytest.mark.parametrize(
    ("commit", "version", "and_back"), [(_OLDER, "0.0.9", False), (OLD_COMMIT, OLD_VERSION, True)]
)
def test_an_upgrade_from_an_older_wheel(host: ServiceHost, commit: str, version: str, and_back: bool) -> None:
    """The new version's `service install` takes over the old version's workers with the job's open files; so does that of 0.2 on the way back."""
    place = Path(host.top)
    wheels.older_source(place / "source", commit, version)
    old = wheels.environment(place / "old", wheels.build(place / "source", place / "old-wheel"))
    wheel = wheels.build(CODE, place / "new-wheel")
    new = wheels.environment(place / "new", wheel)
    host.program = old
    host.install()
    snapshots = {host.ciuic("snapshot", "--wait").strip()}
    with host.job() as job:
        assert host.status()["version"] == version
        for program, expected in ((new, wheel.name.split("-")[1]), (old, version))[: 1 + and_back]:
            before = host.root()
            host.program = program
            host.install()
            job.goes_on()
            assert host.status()["version"] == expected
            assert str(program) in host.shown("ciuic.service", "ExecStart")
            if before["driver"] == "kernel":
                until("the new worker", lambda old=before: host.root()["worker_pid"] != old["worker_pid"])
                after = host.mounted()
                assert "ciuic-workers.service" in host("cat", f"/proc/{after['worker_pid']}/cgroup")
            job.goes_on()
            snapshots.add(host.ciuic("snapshot", "--wait").strip())
            listed = [one["id"] for one in json.loads(host.ciuic("list", "--json"))["snapshots"]]
            assert snapshots <= set(listed)
    host.ciuic("verify", "--all", "--checksum")
