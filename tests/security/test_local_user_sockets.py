"""Attacker: a local user who may connect to `pair.sock` and `watch.sock`.

Daemon and other users are not kept waiting.
"""

from __future__ import annotations

import grp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.attackers import (
    CUT,
    FLOOD,
    INTRODUCE,
    KNOWN,
    SEND_A_FILE,
    SEND_A_LINGERING_SOCKET,
    attack,
    attacking,
)
from support.hostile_files import hostile_files
from support.live import Live, module_tmp
from support.second_user import User
from support.served_sockets import ServedWatch
from support.until import until

from ciuic.daemon import peer_server
from ciuic.daemon.roots.permission import WatchPermission

__all__ = ["module_tmp"]
pytestmark = pytest.mark.mount
MALLORY = User(61011, 61011)
ALICE = User(61012, 61012)
TWINS = tuple(User(61020 + number, 61020) for number in range(5))
OLDER_KERNEL = (
    "import sys; from ciuic.protocol import peer_socket;"
    "peer_socket.allow_descriptors = lambda sock, *, allowed: False;"
    "from ciuic.daemon.peer_receiver import main; sys.exit(main(sys.argv[1:]))"
)
"""A receiver that cannot keep callers from sending descriptors, as before Linux 6.16."""


@pytest.fixture(params=["this kernel", "older kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "older kernel":
        command = (peer_server.RECEIVER_COMMAND[0], "-c", OLDER_KERNEL)
        monkeypatch.setattr(peer_server, "RECEIVER_COMMAND", command)
    return str(request.param)


@pytest.fixture
def short_tmp(short_tmp: Path, run_dir: Path) -> Path:
    """Return a directory that every user can enter, as /run."""
    run_dir.chmod(0o755)
    short_tmp.chmod(0o755)
    return short_tmp


@contextmanager
def _live(top: Path, more_config: str) -> Iterator[Live]:
    """Yield a daemon with a root that belongs to Alice, in a directory that every user can enter."""
    root = top / "root"
    root.mkdir()
    os.chown(root, ALICE.uid, ALICE.gid)
    (top / "live").mkdir(mode=0o755)
    with Live(top / "live", more_config=more_config) as one:
        (one.top / "run").chmod(0o755)
        one.run("protect", str(root))
        one.start(root)
        until("the first snapshot", one.list)
        yield one


@contextmanager
def _watching(top: Path) -> Iterator[Live]:
    """Yield a daemon that watches every user's trainers, so that Mallory gets further than by default."""
    with _live(top, '\n[watch]\nusers = ["*"]\n') as one:
        until("the sockets", lambda: len(_sockets(one)) == 2)
        yield one


@pytest.fixture(scope="module")
def live(module_tmp: Path) -> Iterator[Live]:
    with _watching(module_tmp) as one:
        yield one


def _sockets(live: Live) -> list[Path]:
    return [path for name in ("pair", "watch") if (path := live.top / f"run/{name}.sock").is_socket()]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _parent(pid: int) -> int:
    """Return the parent's pid, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _receivers(path: Path) -> list[int]:
    """Return the processes that own this socket; their helpers have the same command line."""
    named = {pid for pid, command in _commands().items() if b'"path":"%s"' % os.fsencode(path) in command}
    # Without a parent the process has ended since it was listed: it was a helper, for a receiver stays.
    return sorted(pid for pid in named if _parent(pid) not in {0, *named})


def _commands() -> dict[int, bytes]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def _receiver(path: Path) -> int:
    (one,) = _receivers(path)
    return one


def _helpers(receiver: int) -> list[int]:
    """Return the children of the process. One that hangs in its exit has no command line any more."""
    return [pid for pid in _commands() if _parent(pid) == receiver]


# -- finding 3: descriptors that do not close


def test_a_descriptor_that_never_closes_does_not_touch_the_daemon(short_tmp: Path) -> None:
    """A descriptor whose close hangs leaves the daemon answering, capturing and watching.

    The daemon is never in uninterruptible sleep, though the sender may have trainers watched, and an alert
    names the user.
    """
    with _watching(short_tmp) as live, hostile_files(short_tmp / "hostile") as file:
        assert live.daemon is not None
        for path in _sockets(live):
            attack(MALLORY, SEND_A_FILE, str(path), str(file))
        until("the alert", lambda: f"user {MALLORY.uid} sent" in str(live.status()))
        assert _state(live.daemon.pid) != "D"
        assert attack(ALICE, INTRODUCE, str(live.top / "run/watch.sock"), "alices") == "welcome"
        assert attack(ALICE, CUT, str(live.top / "run/pair.sock"), "").startswith("cs-")
        assert live.snapshot()
        # It does not wait for the close that hangs.
        live.stop()


def test_only_the_sender_of_unclosable_descriptors_is_refused(short_tmp: Path, kernel: str) -> None:
    """A sender of descriptors that never close hangs one process at most, and others are served.

    The process ends once the file system is gone.
    """
    with ServedWatch(short_tmp) as served:
        receiver = _receiver(served.path)
        with hostile_files(short_tmp / "hostile") as file:
            assert "not that of a trainer" in attack(MALLORY, SEND_A_FILE, str(served.path), str(file))
            until("the alert", lambda: f"socket:watch.sock:{MALLORY.uid}" in served.alerts())
            for _ in range(3):
                attack(MALLORY, SEND_A_FILE, str(served.path), str(file))
                assert "do not close" in attack(MALLORY, INTRODUCE, str(served.path), "again")
            assert attack(ALICE, INTRODUCE, str(served.path), "alices") == "welcome"
            assert _receiver(served.path) == receiver
            assert len(_helpers(receiver)) == 1
        until("the end of the helper", lambda: not _helpers(receiver) and not served.alerts())


@pytest.mark.full
def test_lingering_sockets_do_not_delay_the_daemon(live: Live) -> None:
    """Sockets whose last close lingers for ten minutes do not keep the daemon waiting."""
    paths = [str(path) for path in _sockets(live)]
    with attacking(MALLORY, SEND_A_LINGERING_SOCKET, *paths):
        for _ in range(3):
            assert live.status() is not None
        assert attack(ALICE, INTRODUCE, str(live.top / "run/watch.sock"), "alices") == "welcome"
        assert attack(ALICE, CUT, str(live.top / "run/pair.sock"), "").startswith("cs-")


def test_sockets_that_linger_keep_no_other_user_waiting(short_tmp: Path, kernel: str) -> None:
    """A helper closes lingering sockets on kernels where any caller can send descriptors."""
    with (
        ServedWatch(short_tmp) as served,
        attacking(MALLORY, SEND_A_LINGERING_SOCKET, *[str(served.path)] * 5),
    ):
        receiver = _receiver(served.path)
        assert attack(ALICE, INTRODUCE, str(served.path), "alices") == "welcome"
        assert _receiver(served.path) == receiver


def test_descriptors_of_unpermitted_callers_are_not_received(short_tmp: Path, kernel: str) -> None:
    """A caller whose trainers are not watched is refused, and its descriptors are never received."""
    with (
        hostile_files(short_tmp / "hostile") as file,
        ServedWatch(short_tmp, WatchPermission(owners=frozenset({ALICE.uid}))) as served,
    ):
        output = attack(MALLORY, SEND_A_FILE, str(served.path), str(file))
        assert f"does not watch trainers of user {MALLORY.uid}" in output
        assert attack(ALICE, INTRODUCE, str(served.path), "alices") == "welcome"
        until("the end of helpers", lambda: not _helpers(_receiver(served.path)))
        assert served.alerts() == {}


def test_a_receiver_may_do_nothing(live: Live) -> None:
    """A receiver has no capability, can gain none, and cannot be traced."""
    for path in _sockets(live):
        lines = Path(f"/proc/{_receiver(path)}/status").read_text().splitlines()
        facts = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        assert (int(facts["CapPrm"], 16), int(facts["CapEff"], 16), facts["NoNewPrivs"]) == (0, 0, "1")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_ends_or_stands_still_is_replaced(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """A receiver that ends or stops is replaced for the next caller, and trainers stay watched."""
    monkeypatch.setattr(peer_server, "SILENT_SECONDS", 3.0)
    with ServedWatch(short_tmp) as served:
        assert attack(ALICE, INTRODUCE, str(served.path), "before") == "welcome"
        first = _receiver(served.path)
        os.kill(first, sent)
        until("another receiver", lambda: (found := _receivers(served.path)) and first not in found)
        until("an answer", lambda: attack(ALICE, INTRODUCE, str(served.path), "after") == "welcome")


# -- finding 7: floods


@pytest.mark.full
def test_silent_connections_of_one_user_delay_no_other_user(live: Live) -> None:
    """More silent connections of one user than both sockets hold do not keep other users waiting."""
    pair, watch = (str(path) for path in _sockets(live))
    with attacking(MALLORY, FLOOD, pair, "300"), attacking(MALLORY, FLOOD, watch, "600"):
        for number in range(5):
            assert attack(ALICE, INTRODUCE, watch, f"alices {number}") == "welcome"
            assert attack(ALICE, KNOWN, pair, "cs-123456") == "[('cs-123456', 'gone')]"
        assert attack(ALICE, CUT, pair, "").startswith("cs-")
        assert attack(User(0, 0), INTRODUCE, watch, "roots") == "welcome"


def test_a_flood_of_many_users_keeps_no_owner_out(live: Live) -> None:
    """The owner of a root is answered with every place taken by users within their own limits."""
    pair, _ = (str(path) for path in _sockets(live))
    floods = [attacking(user, FLOOD, pair, "80") for user in TWINS]
    for flood in floods:
        flood.__enter__()
    try:
        for _ in range(3):
            assert attack(ALICE, KNOWN, pair, "cs-123456") == "[('cs-123456', 'gone')]"
        assert attack(ALICE, CUT, pair, "").startswith("cs-")
    finally:
        for flood in floods:
            flood.__exit__(None, None, None)


def test_a_member_of_the_group_does_not_keep_root_out(short_tmp: Path) -> None:
    """Silent connections of the control group, up to its limit, do not block root's commands."""
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, 65534))
    with _live(short_tmp, f'\n[control]\ngroup = "{group.gr_name}"\n') as live:
        member = User(61013, 61013, (group.gr_gid,))
        with attacking(member, FLOOD, str(live.top / "run/control.sock"), "600", "SOCK_STREAM"):
            for _ in range(3):
                assert live.status() is not None
        live.stop()


# -- finding 11: answers to callers without permission


def test_a_snapshot_is_visible_only_to_permitted_users(live: Live) -> None:
    """Only its requester, the owner of its root and root learn of a snapshot; to others it never existed."""
    pair = str(live.top / "run/pair.sock")
    taken = attack(ALICE, CUT, pair, "").split()[0]
    scheduled = live.list()[-1].id
    until("the commit", lambda: taken in [one.id for one in live.list()])
    ids = sorted((taken, scheduled, "cs-123456"))
    assert attack(MALLORY, KNOWN, pair, *ids) == str([(id_, "gone") for id_ in ids])
    expected = str([(id_, "gone" if id_ == "cs-123456" else "committed") for id_ in ids])
    assert attack(ALICE, KNOWN, pair, *ids) == expected
    assert attack(User(0, 0), KNOWN, pair, *ids) == expected
    assert "no protected root belongs to you" in attack(MALLORY, CUT, pair, "")


def test_group_membership_is_read_from_the_kernel(short_tmp: Path) -> None:
    """Group membership is what the kernel reports for the process, not what the accounts say.

    A process that has dropped the group is no member.
    """
    member, stranger = User(61013, 61013, (60999,)), User(61013, 61013)
    with ServedWatch(short_tmp, WatchPermission(group_id=60999)) as served:
        assert attack(member, INTRODUCE, str(served.path), "member") == "welcome"
        assert "NotPermitted" in attack(stranger, INTRODUCE, str(served.path), "stranger")
        # More than one kilobyte of group ids.
        many = User(61013, 61013, tuple(range(60000, 61000)))
        assert attack(many, INTRODUCE, str(served.path), "many") == "welcome"
        # More than a message to the daemon can hold; a user namespace may have 65536. The daemon once ended
        # by it.
        too_many = User(61013, 61013, (60999, *range(100000, 114000)))
        assert "NotPermitted" in attack(too_many, INTRODUCE, str(served.path), "too many")
        assert attack(member, INTRODUCE, str(served.path), "after") == "welcome"
