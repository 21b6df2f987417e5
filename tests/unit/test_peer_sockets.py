"""Sockets that strangers connect to: whose connections there is room for, what is safe to close, and names that are slow to come."""

from __future__ import annotations

import ast
import grp
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.peers import connected, send_descriptors

from ciuic import peer_socket
from ciuic.daemon import accounts as accounts_module
from ciuic.daemon.accounts import Accounts, Wanted
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.events import EventBus
from ciuic.daemon.peer_helper import is_harmless
from ciuic.daemon.peer_places import Place, Places
from ciuic.peer_socket import Queued
from ciuic.watch_page import Page

# -- places


@given(st.lists(st.integers(0, 6), max_size=120), st.frozensets(st.integers(1, 6)))
def test_a_user_with_nothing_gets_a_place_unless_others_have_as_little(
    arrivals: list[int], known: frozenset[int]
) -> None:
    """However others arrive: no user has more than its own places, all together never more than there are, root always gets in, and a
    known user that has none is refused only where each place is root's or a known user's who has one or two."""
    places = Places(max_connections=20, max_of_a_user=8)
    places.known = known
    here: dict[int, Place] = {}
    for number, uid in enumerate(arrivals):
        counts = Counter(place.uid for place in here.values())
        refused = places.is_one_too_many(uid, counts)
        if not refused and places.is_full(counts):
            victim = places.victim(uid, counts, here.values())
            refused = victim is None
            if victim is not None:
                del here[victim]
        if not refused:
            here[number] = Place(number, uid, silent=True)
        elif uid in known and not counts[uid]:
            assert all(
                place.uid == 0 or (place.uid in known and counts[place.uid] <= 2) for place in here.values()
            )
        after = Counter(place.uid for place in here.values())
        assert after.total() <= 20
        assert all(count <= 8 for owner, count in after.items() if owner != 0)


def test_who_waits_for_an_answer_is_not_sent_away() -> None:
    """Only connections that have said nothing make room."""
    places = Places(max_connections=2, max_of_a_user=2)
    busy = [Place(1, 5, silent=False), Place(2, 5, silent=False)]
    assert places.victim(6, Counter({5: 2}), busy) is None
    assert places.victim(0, Counter({5: 2}), [busy[0], Place(2, 5, silent=True)]) == 2


# -- what is queued


@pytest.fixture(params=[True, False])
def path_and_listener(
    request: pytest.FixtureRequest, short_tmp: Path
) -> Iterator[tuple[Path, peer_socket.socket.socket]]:
    """A listener, with and without descriptors allowed."""
    path = short_tmp / "s"
    with peer_socket.listen(path, mode=0o600) as listener:
        peer_socket.allow_descriptors(listener, allowed=request.param)
        yield path, listener


@pytest.mark.parametrize("peer_stays", [True, False])
@pytest.mark.parametrize("before", [[], [b""], [b"x", b""]])
@pytest.mark.parametrize("last", [b"", b"x"])
def test_it_is_known_whether_descriptors_are_queued(
    path_and_listener: tuple[Path, peer_socket.socket.socket],
    peer_stays: bool,
    before: list[bytes],
    last: bytes,
) -> None:
    """Behind whatever else, empty messages included, with the peer there or gone; none is received by looking."""
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


def test_what_is_handed_on_is_a_pidfd_and_pages() -> None:
    """Everything else is not: files, pipes, sockets, memory that may shrink, nothing at all."""
    page = Page()
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


# -- names


def _alerts() -> Alerts:
    return Alerts(EventBus(lambda: 0), lambda: 0)


def test_a_name_service_that_hangs_leaves_what_was_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The event loop goes on, no second thread is started to hang, an alert says so; when it answers again that counts, also for the
    control socket."""
    monkeypatch.setattr(accounts_module, "LOOKUP_SECONDS", 0.05)
    free, asked = threading.Event(), []
    free.set()

    def getgrnam(name: str) -> grp.struct_group:
        asked.append(name)
        assert free.wait(60)
        return grp.struct_group((name, "x", 4000 + len(asked), []))

    monkeypatch.setattr(accounts_module.grp, "getgrnam", getgrnam)
    alerts = _alerts()

    async def main() -> None:
        control = tmp_path / "control.sock"
        control.touch()
        accounts = Accounts(lambda: Wanted("staff", ("root", "*")), alerts, control_socket=control)
        assert await accounts.refresh()
        free.clear()
        for _ in range(4):
            assert not await accounts.refresh()
            assert os.geteuid() != 0 or control.stat().st_gid == 4001
            assert (accounts.group_id, accounts.user_ids, accounts.everybody) == (4001, frozenset({0}), True)
        assert [alert.key for alert in alerts.standing()] == ["accounts"]
        assert len(asked) == 2
        free.set()
        while not await accounts.refresh():
            pass
        assert accounts.group_id == 4000 + len(asked)

        assert os.geteuid() != 0 or control.stat().st_gid == accounts.group_id

    trio.run(main)
    assert alerts.standing() == []


def test_names_of_another_configuration_stand_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was changed in the configuration, with a name service that hangs: the old one's members are out."""
    monkeypatch.setattr(accounts_module, "LOOKUP_SECONDS", 0.05)
    free = threading.Event()
    wanted = [Wanted("one", ()), Wanted("two", ())]

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


def test_the_event_loop_asks_no_name_service() -> None:
    """Of the daemon's modules only these import it, and they ask in threads."""
    daemon = Path(accounts_module.__file__).parent
    found = set()
    for file in daemon.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import) and {"pwd", "grp"} & {alias.name for alias in node.names}:
                found.add(file.name)
    assert found == {"accounts.py", "alert_command.py"}
