"""Attacker: the owner of a root, who may take and hold snapshots of it.

The repository's disk stays the operator's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.attackers import CUT, CUTS, attack
from support.live import Live
from support.second_user import User
from support.until import until

from ciuic.errors import UsageError
from ciuic.protocol import pairing

pytestmark = pytest.mark.mount
OWNER = User(61014, 61014)


@pytest.fixture
def live(short_tmp: Path, run_dir: Path) -> Iterator[Live]:
    """Provide a daemon that lets an ordinary user hold two snapshots, and three within an hour."""
    run_dir.chmod(0o755)
    short_tmp.chmod(0o755)
    root, top = short_tmp / "root", short_tmp / "live"
    root.mkdir()
    os.chown(root, OWNER.uid, OWNER.gid)
    top.mkdir(mode=0o755)
    limits = "\n[holds]\nmax_of_a_user = 2\nmax_of_a_user_per_hour = 3\n"
    with Live(top, more_config=limits) as one:
        (top / "run").chmod(0o755)
        one.run("protect", str(root))
        one.start(root)
        until("the first snapshot", one.list)
        yield one


def _held(live: Live, user: User) -> tuple[str, str]:
    """Take a held snapshot as the user; return its id once committed, and the daemon's messages about it."""
    pair = str(live.top / "run/pair.sock")
    output = attack(user, CUT, pair, "mine")
    id_, _, note = output.partition(" ")
    assert id_.startswith("cs-"), output
    # The daemon also reports when it is held, a moment after it is listed.
    done = {id_: "committed"}
    until("the commit", lambda: pairing.states_of(pair, (id_,), 30).states == done)
    return id_, note


def _holder(live: Live, id_: str) -> tuple[bool, int | None]:
    shown = live.json("show", id_)
    return shown["held"], shown["hold_uid"]


def test_a_user_holds_so_many_snapshots_and_no_more(live: Live) -> None:
    """Snapshots beyond a user's number of holds are taken, not held, and the answer says so.

    The number counts across daemons and the hourly rate also after releases. Root holds without limit and may
    forget a user's snapshots.
    """
    first, second = _held(live, OWNER), _held(live, OWNER)
    assert (first[1], second[1]) == ("", "")
    assert _holder(live, first[0]) == _holder(live, second[0]) == (True, OWNER.uid)
    id_, note = _held(live, OWNER)
    assert "2 snapshots are held for user" in note
    assert _holder(live, id_) == (False, None)
    live.stop()
    live.start()
    until("the socket", (live.top / "run/pair.sock").is_socket)
    live.wait_mounted(live.top.parent / "root")
    assert "2 snapshots are held for user" in _held(live, OWNER)[1]

    live.run("forget", "-y", first[0])
    live.run("release", second[0])
    assert [_held(live, OWNER)[1], _held(live, OWNER)[1]] == ["", ""]
    newest = live.list()[0].id
    live.run("release", newest)
    assert _held(live, OWNER)[1] == ""
    live.run("release", live.list()[0].id)
    assert "within the hour" in _held(live, OWNER)[1]

    roots = [_held(live, User(0, 0)) for _ in range(4)]
    assert {note for _, note in roots} == {""}
    assert {_holder(live, id_) for id_, _ in roots} == {(True, None)}
    assert live.run("forget", "-y", roots[0][0], expect=1)


def test_a_user_takes_so_many_snapshots_in_a_while_and_no_more(live: Live) -> None:
    """Snapshots that are not held have a rate for each ordinary user; root has none, and may take more."""
    pair = str(live.top / "run/pair.sock")
    output = attack(OWNER, CUTS, pair)
    assert "within 30 s" in output.splitlines()[-1]
    taken = [line for line in output.splitlines() if line.startswith("cs-")]
    assert len(taken) <= 12
    with pairing.ask(pair, pairing.Cut(training="cs-aaaaaaaa", repository="/x", time_ns=1)) as connection:
        assert isinstance(pairing.answer(connection, 60), pairing.Taken)


def test_a_path_that_leads_out_of_a_root_is_refused(live: Live) -> None:
    """A directory that is named by way of a root and .. is not taken for one in that root."""
    path = f"{live.top.parent}/root/../elsewhere"
    with (
        pairing.ask(str(live.top / "run/pair.sock"), pairing.Files(roots=(path,))) as connection,
        pytest.raises(UsageError, match=r"\.\."),
    ):
        pairing.answer(connection, 60)
