"""Sets as `list --sets` tells them, compared with a model: which are whole, what others lack, and what names mean."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli_repository import directory, store_tree
from support.remote_host import RemoteHost, new_remote

from ciuic.cli.app import cli
from ciuic.errors import NotFound, UsageError
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.upkeep.collect import give_up_snapshots, resolve_snapshots
from ciuic.repository.snapshot_sets import named_set, sets_of
from ciuic.types import RootRecord, SetMember, Snapshot, SnapshotDraft, SnapshotId

HOSTS = ("a", "b", "c", "d")
NAMES = ("night", "eve", "0a")


class Attempt(NamedTuple):
    """One cut of a set, with what becomes of its members."""

    id: str
    name: str
    members: tuple[str, ...]
    kept: frozenset[str]
    """Members whose snapshots are there in the end."""
    forgotten: frozenset[str]
    """Of the others those that were stored and given up; the rest were never committed."""

    @property
    def lacking(self) -> list[str]:
        return [member for member in self.members if member not in self.kept]


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    """Draw attempts, oldest first."""
    found = []
    ids = draw(st.lists(st.text("0a", min_size=32, max_size=32), unique=True, min_size=1, max_size=5))
    for id_ in ids:
        members = tuple(sorted(draw(st.sets(st.sampled_from(HOSTS), min_size=1))))
        fates = {
            member: draw(st.sampled_from(("kept", "kept", "kept", "forgotten", "never")))
            for member in members
        }
        kept = frozenset(member for member in members if fates[member] == "kept")
        forgotten = frozenset(member for member in members if fates[member] == "forgotten")
        found.append(Attempt(id_, draw(st.sampled_from(NAMES)), members, kept, forgotten))
    return found


def _expected(name: str, newest_first: list[Attempt]) -> Attempt | type[Exception]:
    """Return what a name means, said once more and in another way."""
    whole = [one for one in newest_first if one.name == name and not one.lacking]
    some = [one for one in newest_first if one.name == name and one.kept]
    begins = [one for one in newest_first if one.kept and one.id.startswith(name)]
    if whole or some:
        return (whole or some)[0]
    if not begins:
        return NotFound
    return begins[0] if len(begins) == 1 else UsageError


def _snapshot(attempt: Attempt, member: str, number: int) -> Snapshot:
    place = SetMember(id=attempt.id, name=attempt.name, member=member, members=attempt.members)
    return Snapshot(
        id=SnapshotId.parse(f"cs-{number:06x}"), time_ns=number, host=member, roots=(), set_member=place
    )


@given(cut=attempts(), data=st.data())
def test_names_mean_the_newest_whole_set(cut: list[Attempt], data: st.DataObject) -> None:
    """From any mixture of snapshots, in any order, with others between them and copies of some: what is lacking, and what a name means."""
    snapshots = [
        _snapshot(attempt, member, 100 * number + 10 * place)
        for number, attempt in enumerate(cut, 1)
        for place, member in enumerate(attempt.members)
        if member in attempt.kept
    ]
    copies = data.draw(st.lists(st.sampled_from(snapshots), max_size=3)) if snapshots else []
    alone = Snapshot(id=SnapshotId.parse("cs-ffffff"), time_ns=5, host="a", roots=())
    found = sets_of(data.draw(st.permutations([*snapshots, *copies, alone])))
    expected = [one for one in reversed(cut) if one.kept]
    assert [(one.id, list(one.lacking), set(one.found)) for one in found] == [
        (one.id, one.lacking, set(one.kept)) for one in expected
    ]
    for name in (*NAMES, "0", "a", *(one.id for one in cut)):
        meant = _expected(name, expected)
        if isinstance(meant, Attempt):
            assert named_set(name, found).id == meant.id
        else:
            with pytest.raises(meant):
                named_set(name, found)


def test_a_snapshot_that_disagrees_makes_no_set_whole_and_spoils_none() -> None:
    """One that claims another list of members for the same id is of a set of its own; the whole set keeps its name and id."""
    cut = Attempt("0a" * 16, "night", ("a", "b"), frozenset("ab"), frozenset())
    both = [_snapshot(cut, "a", 1), _snapshot(cut, "b", 2)]
    liars = [
        _snapshot(cut._replace(members=("b", "z")), "b", 9),
        _snapshot(cut._replace(members=("a", "b", "z")), "z", 8),
    ]
    found = sets_of([*both, *liars])
    assert [one.lacking for one in found] == [("z",), ("a", "b"), ()]
    assert named_set("night", found) == named_set("0a", found) == found[-1]
    # Nor does it fill the place of one that is missing.
    assert not any(one.is_whole for one in sets_of([both[0], *liars]))


@contextmanager
def _hosts(place: Path) -> Iterator[tuple[str, dict[str, RemoteHost]]]:
    """Make hosts that share a remote; one of them has an identity of its own, and so a space of its own there."""
    url = f"file://{place}/nas"
    with ExitStack() as closing:
        objects = open_objects(url, make=True)
        closing.callback(objects.close)
        remote = new_remote(objects, sealed=False)
        hosts = {
            name: RemoteHost(place / name, remote, name=name, own_identity=name == HOSTS[-1])
            for name in HOSTS
        }
        for host in hosts.values():
            closing.callback(host.repository.close)
        yield url, hosts


def _commit(host: RemoteHost, attempt: Attempt, time_ns: int) -> SnapshotId:
    repository = host.repository
    with repository.writer() as writer:
        below = store_tree(writer, repository.block_size, {b"host": host.name.encode()})
        draft = SnapshotDraft(
            id=repository.snapshots.new_id(),
            time_ns=time_ns,
            host=host.name,
            roots=(RootRecord(path=b"/data", entry=directory(b"", below), mode="offline"),),
            set_member=SetMember(id=attempt.id, name=attempt.name, member=host.name, members=attempt.members),
        )
        return writer.commit(draft).id


@settings(max_examples=5)
@given(cut=attempts())
def test_a_remote_tells_what_its_hosts_have_stored(cut: list[Attempt]) -> None:
    """`list --sets` of a remote says of each set what was stored and not given up, also where a host has a space of its own."""
    with tempfile.TemporaryDirectory() as top, _hosts(Path(top)) as (url, hosts):
        given_up: list[tuple[str, str]] = []
        for number, attempt in enumerate(cut, 1):
            for place, member in enumerate(attempt.members):
                if member in attempt.kept | attempt.forgotten:
                    id_ = _commit(hosts[member], attempt, 1000 * number + place)
                    given_up += [(member, str(id_))] if member in attempt.forgotten else []
        for host in hosts.values():
            host.upload()
        environment = {"CIUIC_CONFIG": "/dev/null", "XDG_CACHE_HOME": f"{top}/cache"}
        with read_remote(hosts["a"].remote, cache_root=Path(top) / "own") as opened:
            chosen = resolve_snapshots(opened, [f"{member}/{id_}" for member, id_ in given_up])
            if chosen:
                give_up_snapshots(opened, chosen, host="a")
        done = CliRunner().invoke(cli, ["--repo", url, "list", "--sets", "--json"], env=environment)
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)["sets"]
    expected = [one for one in reversed(cut) if one.kept]
    assert [(one["id"], one["name"], one["lacking"], one["whole"]) for one in told] == [
        (one.id, one.name, one.lacking, not one.lacking) for one in expected
    ]
    for one, attempt in zip(told, expected, strict=True):
        there = {place["member"] for place in one["members"] if place["snapshot"] is not None}
        assert there == attempt.kept
