"""Commands that read, hold and delete sets, on a repository that has members of several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository

from ciuic.types import SetMember, SnapshotId

OLD, NEW, TORN = "0a" * 16, "0b" * 16, "0c" * 16


class Sets(CliRepository):
    """Repository with two whole sets of the name night, and a newer one that lacks b."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path, root)
        self.noise = os.urandom(5000)
        self.ids = {
            (set_id, member): self.member(set_id, member)
            for set_id, member in ((OLD, "a"), (OLD, "b"), (NEW, "a"), (NEW, "b"), (TORN, "a"))
        }

    def member(self, set_id: str, member: str, members: tuple[str, ...] = ("a", "b")) -> SnapshotId:
        tree = {b"who": member.encode(), b"when": member.encode() + set_id[:2].encode() + self.noise}
        place = SetMember(id=set_id, name="night", member=member, members=members)
        return self.snapshot(tree, set_member=place)

    def json(self, *arguments: str, code: int = 0) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


@pytest.fixture
def sets(tmp_path: Path) -> Sets:
    return Sets(tmp_path / "repo", tmp_path / "data")


def test_sets_are_listed_and_shown(sets: Sets) -> None:
    """A line a set, newest first, with what it lacks; show names the other members, and whether each is here."""
    listed = sets.json("list", "--sets")["sets"]
    assert [(one["id"], one["whole"], one["lacking"]) for one in listed] == [
        (TORN, False, ["b"]),
        (NEW, True, []),
        (OLD, True, []),
    ]
    assert [one["id"] for one in sets.json("list", "--sets", "-n", "1")["sets"]] == [TORN]
    first, *others = sets.run("list", "--sets").stdout.splitlines()[1:]
    assert "1 of 2" in first
    assert "lacks b" in first
    assert all("whole" in line for line in others)
    plain = sets.run("list").stdout.splitlines()
    assert "SET" in plain[0]
    assert all("night" in line for line in plain[1:])
    of_set = [one["set"] for one in sets.json("list")["snapshots"]]
    assert of_set[0] == {"id": TORN, "name": "night"}
    assert "leave out --machine-readable" in sets.run("list", "--sets", "--machine-readable").stderr
    assert sets.json("show", "set:night")["id"] == NEW
    torn = sets.ids[TORN, "a"]
    assert sets.json("show", torn)["set"]["snapshots"] == {"a": torn}
    shown = sets.run("show", torn).stdout
    assert "member   b  missing here" in shown
    assert sets.ids[NEW, "b"] in sets.run("show", "set:night").stdout
    # Where one snapshot is needed, the member is named.
    assert sets.run("cat", "b/set:night", f"{sets.root}/who").stdout == "b"
    several = sets.run("cat", "set:night", f"{sets.root}/who")
    assert (several.exit_code, "2 snapshots here" in several.stderr) == (2, True)
    assert sets.run("show", "set:0").exit_code == 2
    assert sets.run("show", "set:none").exit_code == 3


def test_restore_takes_what_is_whole(sets: Sets, tmp_path: Path) -> None:
    """Each member goes into a directory of its own; a set that lacks one is refused, and so is another's in place."""
    into = tmp_path / "into"
    done = sets.json("restore", "-s", "set:night", "--all", "--all-members", "-d", str(into))
    assert [one["member"] for one in done["restores"]] == ["a", "b"]
    for member in "ab":
        assert (into / member / "data" / "who").read_text() == member
        assert (into / member / "data" / "when").read_bytes() == member.encode() + b"0b" + sets.noise
    refused = sets.run("restore", "-s", "set:0c", "--all", "--member", "a", "-d", str(tmp_path / "no"))
    assert refused.exit_code == 3
    assert "1 of 2 members found; missing: b" in refused.stderr
    assert not (tmp_path / "no").exists()
    words = ("--all", "--incomplete", "--member", "a", "-d", str(tmp_path / "some"))
    assert sets.run("restore", "-s", "set:0c", *words).exit_code == 0
    assert (tmp_path / "some" / "data" / "who").read_text() == "a"
    for named in (("b/set:night",), ("set:night", "--member", "b")):
        other = sets.run("restore", "--all", "-s", *named)
        assert (other.exit_code, "is another host" in other.stderr) == (2, True)
    assert not sets.root.exists()
    assert sets.run("restore", "--all", "-s", "latest", "--incomplete").exit_code == 2
    # In place without -d only what is this host's own; none of these hosts is this one.
    assert "no member" in sets.run("restore", "--all", "-s", "set:night").stderr


@pytest.mark.parametrize("name", ["..", "../up", ".ciuic", "é" * 200])
def test_members_that_no_directory_can_be_named_after_are_restored_one_at_a_time(
    sets: Sets, tmp_path: Path, name: str
) -> None:
    """Nothing of the set is restored then, and the error says how each member is."""
    for member in sorted(("z", name)):
        sets.member("0e" * 16, member, tuple(sorted(("z", name))))
    into = tmp_path / "into"
    words = ("restore", "-s", f"set:{'0e' * 16}", "--all", "-d", str(into))
    refused = sets.run(*words, "--all-members")
    assert (refused.exit_code, "no directory can have the name" in refused.stderr) == (2, True)
    assert not into.exists()
    assert sets.run(*words, "--member", name).exit_code == 0
    assert (into / "data/who").read_text() == name


def test_a_host_restores_its_own_member_in_place(tmp_path: Path) -> None:
    """The member that has this host's name is restored where it was."""
    here = Sets(tmp_path / "repo", tmp_path / "data")
    name = os.uname().nodename
    for member in (name, "zz"):
        here.member("0d" * 16, member, (name, "zz"))
    assert here.run("restore", "-s", "set:0d", "--all").exit_code == 0
    assert (here.root / "who").read_text() == name


def test_verify_names_the_bad_member(sets: Sets) -> None:
    """All members are verified; the damaged one is named, and what is missing has an exit code of its own."""
    assert sets.json("verify", "set:night", "--checksum")["sets"][0]["damaged"] == []
    assert "is not whole here: b is missing" in sets.run("verify", "set:0c").stderr
    assert sets.json("verify", "set:0c", code=8)["sets"][0]["lacking"] == ["b"]
    # Random bytes are stored as they are.
    for pack in (sets.path / "packs").rglob("*.pack"):
        stored = pack.read_bytes()
        pack.write_bytes(stored.replace(b"b0b" + sets.noise[:50], b"b0b" + bytes(50)))
    assert sets.json("verify", "set:night", "--checksum", code=4)["sets"][0]["damaged"] == ["b"]
    printed = sets.run("verify", "set:night", "--checksum").stdout
    assert f"  a  {sets.ids[NEW, 'a']}  right" in printed
    assert f"  b  {sets.ids[NEW, 'b']}  damaged" in printed
    # Damage beside them, in the same pack, is told, and of none of them.
    other = sets.json("verify", "set:0a", "--checksum")
    assert (other["sets"][0]["damaged"], other["damages"]) == ([], [])
    assert [one["snapshots"] for one in other["elsewhere"]] == [[str(sets.ids[NEW, "b"])]]


def test_diff_compares_member_by_member(sets: Sets) -> None:
    """Two sets are compared member by member, and a member that one of them lacks is told."""
    members = sets.json("diff", "set:0a", "set:0b")["members"]
    assert [one["member"] for one in members] == ["a", "b"]
    for one in members:
        assert [(change["kind"], Path(change["path"]).name) for change in one["changes"]] == [
            ("changed", "when")
        ]
    assert sets.json("diff", "set:0b", "set:0c")["members"][1]["changes"] is None
    printed = sets.run("diff", "set:0b", "set:0c")
    assert f"b: {sets.ids[NEW, 'b']} → missing" in printed.stdout
    assert sets.json("diff", "a/set:0a", "b/set:0a")["changes"]


def test_hold_and_forget_take_all_members(sets: Sets) -> None:
    """A hold, a tag and forget mean every member that is here; afterwards the next set has the name."""
    held = sets.json("hold", "set:night")["snapshots"]
    assert {one["id"] for one in held} == {sets.ids[NEW, "a"], sets.ids[NEW, "b"]}
    assert sets.run("forget", "-y", "set:night").exit_code == 1
    sets.run("release", "set:night")
    assert set(sets.json("forget", "-y", "set:night")["removed"]) == {one["id"] for one in held}
    assert sets.json("show", "set:night")["id"] == OLD


def test_a_set_whose_snapshots_cannot_be_read_is_damaged(sets: Sets) -> None:
    """Only its snapshots know of a set: while one cannot be read, no set is told to be none."""
    assert sets.run("verify", "set:nightly").exit_code == 3
    lost = sets.path / "snapshots" / sets.ids[OLD, "a"]
    lost.write_bytes(lost.read_bytes()[:40])
    for arguments in (("verify", "set:nightly"), ("restore", "-s", "set:nightly", "--all", "-d", "/nowhere")):
        result = sets.run(*arguments)
        assert result.exit_code == 4, result.output
        assert "there is no set nightly, but 1 snapshot cannot be read: " in result.stderr
