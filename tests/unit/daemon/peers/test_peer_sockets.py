"""Tests of sockets open to strangers: their slots, what is safe to close, and slow name services."""

from __future__ import annotations

import ast
import grp
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.second_user import User, reach
from support.socket_callers import connected, send_descriptors

from ciuic.daemon.base import accounts as accounts_module
from ciuic.daemon.base.accounts import AccountNames, Accounts
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.runtime import bind_control_socket
from ciuic.daemon.peer_receiver import ConnectionLimits, OpenConnection, is_harmless
from ciuic.daemon.roots.permission import WatchPermission, is_administrator
from ciuic.protocol import peer_socket
from ciuic.protocol.heartbeat_page import HeartbeatPage
from ciuic.protocol.peer_socket import Caller, Queued

# Slots


@given(st.lists(st.integers(0, 6), max_size=120), st.frozensets(st.integers(1, 6)))
def test_a_user_with_nothing_gets_a_place_unless_others_have_as_little(
    arrivals: list[int], known: frozenset[int]
) -> None:
    """A user without a connection is refused only when all slots are taken by users with as few.

    However others arrive, no user has more than its own slots, all together never have more than there are,
    root always gets in, and a known user without one is refused only where each slot is root's or that of a
    known user with one or two.
    """
    places = ConnectionLimits(max_connections=20, max_of_a_user=8)
    places.known = known
    here: dict[int, OpenConnection] = {}
    for number, uid in enumerate(arrivals):
        counts = Counter(place.uid for place in here.values())
        refused = places.is_one_too_many(uid, counts)
        if not refused and places.is_full(counts):
            victim = places.victim(uid, counts, here.values())
            refused = victim is None
            if victim is not None:
                del here[victim]
        if not refused:
            here[number] = OpenConnection(number, uid, silent=True)
        elif uid in known and not counts[uid]:
            assert all(
                place.uid == 0 or (place.uid in known and counts[place.uid] <= 2) for place in here.values()
            )
        after = Counter(place.uid for place in here.values())
        assert after.total() <= 20
        assert all(count <= 8 for owner, count in after.items() if owner != 0)


def test_waiting_connections_are_not_closed() -> None:
    """Only connections that have sent nothing are closed to make room."""
    places = ConnectionLimits(max_connections=2, max_of_a_user=2)
    busy = [OpenConnection(1, 5, silent=False), OpenConnection(2, 5, silent=False)]
    assert places.victim(6, Counter({5: 2}), busy) is None
    assert places.victim(0, Counter({5: 2}), [busy[0], OpenConnection(2, 5, silent=True)]) == 2


# Queued descriptors


@pytest.fixture(params=[True, False])
def path_and_listener(
    request: pytest.FixtureRequest, short_tmp: Path
) -> Iterator[tuple[Path, peer_socket.socket.socket]]:
    """Return path and listener, with and without descriptors allowed."""
    path = short_tmp / "s"
    with peer_socket.listen(path, mode=0o600) as listener:
        peer_socket.allow_descriptors(listener, allowed=request.param)
        yield path, listener


@pytest.mark.parametrize("peer_stays", [True, False])
@pytest.mark.parametrize("before", [[], [b""], [b"x", b""]])
@pytest.mark.parametrize("last", [b"", b"x"])
def test_queued_descriptors_are_detected(
    path_and_listener: tuple[Path, peer_socket.socket.socket],
    peer_stays: bool,
    before: list[bytes],
    last: bytes,
) -> None:
    """Queued descriptors are detected behind any data, without receiving them, peer alive or gone."""
    path, listener = path_and_listener
    caller = connected(path)
    for data in before:
        caller.send(data)
    sent = send_descriptors(caller, last, [0, 1], seconds=0)
    with peer_socket.accept(listener) as connection:
        if not peer_stays:
            caller.close()
        open_before = len(os.listdir("/proc/self/fd"))
        expected = (
            Queued.MESSAGE
            if before
            else Queued.DESCRIPTORS
            if sent
            else Queued.NOTHING
            if peer_stays
            else Queued.END
        )
        assert [peer_socket.queued(connection) for _ in range(2)] == [expected] * 2
        assert peer_socket.is_safe_to_close(connection) is not sent
        assert len(os.listdir("/proc/self/fd")) == open_before
    caller.close()


def test_only_a_pidfd_and_pages_are_handed_on() -> None:
    """Only a pidfd and pages are handed on, and files, pipes, sockets and shrinkable memory are refused."""
    page = HeartbeatPage()
    life, plain = os.pidfd_open(os.getpid()), os.memfd_create("plain")
    null = os.open("/dev/null", os.O_RDWR)
    read_end, write_end = os.pipe()
    try:
        assert is_harmless([life])
        assert is_harmless([life, page.fd])
        for fds in (
            [],
            [page.fd],
            [null],
            [life, life],
            [life, plain],
            [life, null],
            [read_end],
            [life, write_end],
        ):
            assert not is_harmless(fds)
    finally:
        for fd in (life, plain, null, read_end, write_end):
            os.close(fd)


# Names


def _alerts() -> Alerts:
    return Alerts(EventBus(lambda: 0), lambda: 0)


def test_known_members_count_while_a_name_service_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The known members count while a name service hangs; the event loop runs and an alert says so.

    No second thread is started to hang. Once the service answers again its answer counts, also for the
    control socket.
    """
    monkeypatch.setattr(accounts_module, "LOOKUP_SECONDS", 0.05)
    free, looked_up = threading.Event(), []
    free.set()

    def getgrnam(name: str) -> grp.struct_group:
        looked_up.append(name)
        assert free.wait(60)
        return grp.struct_group((name, "x", 4000 + len(looked_up), []))

    monkeypatch.setattr(accounts_module.grp, "getgrnam", getgrnam)
    alerts = _alerts()

    async def main() -> None:
        control = tmp_path / "control.sock"
        control.touch()
        accounts = Accounts(lambda: AccountNames("staff", ("root", "*")), alerts, control_socket=control)
        assert await accounts.refresh()
        free.clear()
        for _ in range(4):
            assert not await accounts.refresh()
            assert os.geteuid() != 0 or control.stat().st_gid == 4001
            assert (accounts.group_id, accounts.user_ids, accounts.everybody) == (4001, frozenset({0}), True)
        assert [alert.key for alert in alerts.standing()] == ["accounts"]
        assert len(looked_up) == 2
        free.set()
        while not await accounts.refresh():
            pass
        assert accounts.group_id == 4000 + len(looked_up)

        assert os.geteuid() != 0 or control.stat().st_gid == accounts.group_id

    trio.run(main)
    assert alerts.standing() == []


def test_members_of_a_replaced_group_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old group's members are out after the group was changed, even if the name service hangs."""
    monkeypatch.setattr(accounts_module, "LOOKUP_SECONDS", 0.05)
    free = threading.Event()
    wanted = [AccountNames("one", ()), AccountNames("two", ())]

    def getgrnam(name: str) -> grp.struct_group:
        assert name == "one" or free.wait(60)
        return grp.struct_group((name, "x", 4001, []))

    monkeypatch.setattr(accounts_module.grp, "getgrnam", getgrnam)

    async def main() -> None:
        accounts = Accounts(lambda: wanted[0], _alerts())
        assert await accounts.refresh()
        del wanted[0]
        assert not await accounts.refresh()
        assert accounts.group_id is None
        free.set()

    trio.run(main)


class _Groups:
    """Group database: one to four are 4001 to 4004, and `hangs` blocks for as long as `free` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        monkeypatch.setattr(accounts_module.grp, "getgrnam", self._find)

    def _find(self, name: str) -> grp.struct_group:
        if name == "hangs":
            assert self.free.wait(60)
        return grp.struct_group((name, "x", 4001 + ["one", "two", "three", "hangs"].index(name), []))


@pytest.mark.mount
@pytest.mark.parametrize("then", [None, "two", "hangs"])
def test_members_of_a_removed_group_are_no_administrators(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path, run_dir: Path, then: str | None
) -> None:
    """A reload without a group, or with another one, takes the control socket back from the old one's members.

    So it does on the other sockets, which ask for the group with each message.
    """
    groups = _Groups(monkeypatch)
    run_dir.chmod(0o755)
    short_tmp.chmod(0o755)
    path = short_tmp / "control.sock"
    member = User(61031, 61031, (4001,))
    names = [AccountNames("one", ())]

    async def main() -> None:
        accounts = Accounts(lambda: names[-1], _alerts(), control_socket=path)
        await accounts.start()
        assert accounts.revoked() == 0
        with bind_control_socket(path, accounts.group_id):
            assert await trio.to_thread.run_sync(reach, member, [path]) == {str(path)}
            names.append(AccountNames(then, ()))
            if then == "hangs":
                monkeypatch.setattr(accounts_module, "LOOKUP_SECONDS", 0.05)
            await accounts.refresh()
            assert await trio.to_thread.run_sync(reach, member, [path]) == set()
            expected = (0o660, 4002) if then == "two" else (0o600, os.getegid())
            facts = path.stat()
            assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == expected
            assert accounts.revoked() > 0
            assert not is_administrator(Caller(member.uid, frozenset(member.groups)), accounts.group_id)
            permission = WatchPermission(accounts.group_id)
            assert not permission(Caller(member.uid, frozenset(member.groups)))
        groups.free.set()

    trio.run(main)


def test_a_permission_that_could_not_be_taken_back_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next look-up tries again where the socket's owner or mode could not be changed."""
    _Groups(monkeypatch)
    names = [AccountNames("one", ())]
    set_to: list[int | None] = []

    def permit(path: Path, group_id: int | None) -> None:
        set_to.append(group_id)
        if set_to == [4001, None]:
            raise PermissionError("no")

    monkeypatch.setattr(accounts_module, "permit_control_group", permit)

    async def main() -> None:
        accounts = Accounts(lambda: names[-1], _alerts(), control_socket=tmp_path / "control.sock")
        await accounts.refresh()
        names.append(AccountNames(None, ()))
        for _ in range(3):
            await accounts.refresh()

    trio.run(main)
    assert set_to == [4001, None, None]


def test_the_event_loop_asks_no_name_service() -> None:
    """The daemon's modules that import name lookups are listed here, and they look up in threads."""
    daemon = Path(accounts_module.__file__).parents[1]
    found = set()
    for file in daemon.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import) and {"pwd", "grp"} & {alias.name for alias in node.names}:
                found.add(file.name)
    assert found == {"accounts.py", "alert_hook.py"}
