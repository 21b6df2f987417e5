"""Daemons of several hosts whose snapshots are of one instant, while programs on them pass messages to each other.

Each host is a daemon with a root and a repository of its own; they share the machine and a remote. Tokens go around
the hosts: who gets one with the number n writes n + 1 to a file of its root, durably, and sends it on. So at any
instant the numbers of a token on the hosts follow each other, and a number whose predecessor is missing is an
effect without its cause.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Live, installed
from support.token_ring import Host, Ring, require_one_instant
from support.until import until

from ciuic.errors import CiuicError
from ciuic.protocol.control import ControlClient
from ciuic.protocol.control_types import HoldRequest, SnapshotRequest
from ciuic.types import SetMember

pytestmark = pytest.mark.mount

HOSTS = ("a", "b", "c")

# Takes part as the command does, and is killed by itself when it has said that it is ready.
KILLED_WHEN_READY = """
import os, signal, sys
from ciuic.cli import main
from ciuic.remote.objects.directory_objects import DirectoryObjects
create = DirectoryObjects.create
def dying(self, name, data):
    made = create(self, name, data)
    if "/ready/" in name:
        os.kill(os.getpid(), signal.SIGKILL)
    return made
DirectoryObjects.create = dying
sys.argv[0] = "ciuic"
main()
"""


@pytest.fixture(scope="module")
def hosts(run_dir: Path) -> Iterator[list[Host]]:
    """Provide three hosts with one remote, which is sealed."""
    top = run_dir / "sets"
    made: list[Host] = []
    key = top / "key"
    try:
        for name in HOSTS:
            place = top / name
            root = place / "root"
            root.mkdir(parents=True)
            remote = f'[remote]\nurl = "file://{top}/nas"\nkey_file = "{key}"\n'
            live = Live(place, more_config=remote)
            made.append(Host(name, HOSTS, live, root))
        made[0].live.run("remote", "init")
        for host in made:
            host.live.start()
            host.live.run("protect", os.fsencode(host.root))
            host.live.wait_mounted(host.root)
        yield made
    finally:
        for host in made:
            host.live.close()


def test_snapshots_of_a_set_have_no_effect_without_its_cause(hosts: list[Host]) -> None:
    """All hosts are cut at one instant: of messages between them, none is received that is not sent."""
    with Ring(hosts) as ring:
        for number in range(2):
            name = f"round-{number}"
            commands = [host.start(name) for host in hosts]
            for command in commands:
                out, err = command.communicate(timeout=120)
                assert command.returncode == 0, (out, err)
            ring.go_on()
            snapshots = [host.snapshots()[name] for host in hosts]
            places = [one.set_member for one in snapshots if one.set_member is not None]
            assert len({place.id for place in places}) == 1
            assert [place.member for place in places] == list(HOSTS)
            assert {place.members for place in places} == {HOSTS}
            require_one_instant(hosts, snapshots)
    shown = hosts[1].live.json("show", str(snapshots[1].id))
    # The repository of one host has its own member alone.
    here = {"snapshots": {"b": str(snapshots[1].id)}, "whole": False}
    named = {"id": places[1].id, "name": "round-1", "member": "b", "members": list(HOSTS)}
    assert shown["set"] == named | here
    listed = hosts[1].live.json("list", "--sets")["sets"]
    assert [(one["name"], one["lacking"]) for one in listed[:1]] == [("round-1", ["a", "c"])]
    again = hosts[0].start("round-0")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 2
    assert b"there is a set 'round-0' already" in err


def test_one_command_starts_the_others_over_ssh(hosts: list[Host]) -> None:
    """With --ssh the command of one host cuts all, prints its own id, and fails where another host fails."""
    top = hosts[0].live.top.parent
    # Runs the command here, as the host that it names.
    ssh = top / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nexport CIUIC_CONFIG={top}/$2/ciuic.toml\neval "$3"\n'
    )
    ssh.chmod(0o755)
    env = {**hosts[0].live.env, "CIUIC_SSH_COMMAND": str(ssh), "CIUIC_SSH_PROGRAM": str(installed())}
    command = [
        str(installed()), "snapshot", "--ssh", "--set", "it's one", "--hosts", ",".join(HOSTS), "--member", "a", "--wait",
        "--wait-for", "30s", "-m", "a b",
    ]  # fmt: skip
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    snapshots = [host.snapshots()["it's one"] for host in hosts]
    assert done.stdout == f"{snapshots[0].id}\n"
    assert [one.message for one in snapshots] == ["a b"] * 3
    assert f"b: {snapshots[1].id}\nc: {snapshots[2].id}\n" in done.stderr
    again = subprocess.run(
        command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=120
    )
    assert again.returncode == 2
    # A host that cannot be reached is missing here, and only its ssh knows why.
    ssh.write_text(
        "#!/bin/sh\necho 'Warning: a key was added' >&2\nprintf 'b: Permission denied\\033[2J\\n' >&2\nexit 255\n"
    )
    command[command.index("it's one")] = "another"
    command[command.index("30s")] = "2s"
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode not in (0, 2)
    assert "b: Warning: a key was added\nb: $'b: Permission denied\\E[2J'\n" in done.stderr


def test_a_command_that_is_killed_while_it_holds_leaves_no_mixed_set(hosts: list[Host]) -> None:
    """The killed command's host goes on and has no snapshot of the set; the others have ones of one instant, or none."""
    with Ring(hosts) as ring:
        program = (sys.executable, "-c", KILLED_WHEN_READY)
        dying = hosts[2].start("killed", "--wait-for", "10s", program=program)
        commands = [host.start("killed", "--wait-for", "10s") for host in hosts[:2]]
        assert dying.wait(120) == -signal.SIGKILL
        dying.communicate()
        said = [command.communicate(timeout=120)[1].decode() for command in commands]
        codes = [command.returncode for command in commands]
        ring.go_on()
        # It holds a second time, after what the dead one held.
        hosts[2].live.run("snapshot", "--wait")
        assert "killed" not in hosts[2].snapshots()
        have = [host for host in hosts if "killed" in host.snapshots()]
        assert codes == ([0, 0] if have else [1, 1]), said
        assert len(have) in (0, 2)
        if have:
            require_one_instant(have, [host.snapshots()["killed"] for host in have])


def test_a_hold_ends_by_itself_while_the_daemon_hangs(hosts: list[Host]) -> None:
    """A program that writes goes on at the limit although nobody can release it, and nothing is cut afterwards."""
    host = hosts[0]
    member = SetMember(id="ab" * 16, name="hung", member="a", members=("a",))
    request = HoldRequest(snapshot=SnapshotRequest(), set_member=member, limit_seconds=1.0)
    assert host.live.daemon is not None
    with ControlClient(host.live.top / "run/control.sock") as control:
        token = control.hold(request).token
        host.live.daemon.send_signal(signal.SIGSTOP)
        try:
            writing = threading.Thread(target=Ring.write, args=(host, 0, 1), daemon=True)
            writing.start()
            writing.join(60)
            assert not writing.is_alive()
        finally:
            host.live.daemon.send_signal(signal.SIGCONT)
        with pytest.raises(CiuicError):
            control.cut_hold(token)
    host.live.run("snapshot", "--wait")
    assert "hung" not in host.snapshots()


@pytest.mark.parametrize("lost_at", ["here", "ready", "decision"])
def test_lost_objects_of_a_meeting(hosts: list[Host], lost_at: str) -> None:
    """All objects of sets are lost while hosts meet: no set is mixed, who has no snapshot says so, and the next set is cut."""
    meeting = hosts[0].live.top.parent / "nas/sets"
    shutil.rmtree(meeting, ignore_errors=True)
    name = f"lost at {lost_at}"
    with Ring(hosts) as ring:
        commands = [host.start(name, "--wait-for", "5s") for host in hosts]
        until("the meeting", lambda: any(path.match(f"*/{lost_at}*") for path in meeting.rglob("*")))
        shutil.rmtree(meeting)
        said = [command.communicate(timeout=120)[1].decode() for command in commands]
        ring.go_on()
        found = [(host, host.snapshots().get(name)) for host in hosts]
        assert [command.returncode for command in commands] == [int(one is None) for _, one in found], said
        have = [(host, one) for host, one in found if one is not None and one.set_member is not None]
        for id_ in {one.set_member.id for _, one in have if one.set_member is not None}:
            same = [
                (host, one) for host, one in have if one.set_member is not None and one.set_member.id == id_
            ]
            require_one_instant([host for host, _ in same], [one for _, one in same])
        name = f"after {lost_at}"
        for command in [host.start(name) for host in hosts]:
            out, err = command.communicate(timeout=120)
            assert command.returncode == 0, (out, err)
        ring.go_on()
        require_one_instant(hosts, [host.snapshots()[name] for host in hosts])
