"""Sets of two hosts with a remote: each host restores its own member of a set that is whole, and any machine all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository, Host
from support.remote_host import Elsewhere

from ciuic.types import SetMember

FIRST, SECOND = "0a" * 16, "0b" * 16
MEMBERS = ("a", "b")


class Two:
    """Hosts a and b, which share a remote, and a machine elsewhere."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.url = f"file://{top}/nas"
        self.hosts = {name: Host(top / name) for name in MEMBERS}
        a, b = self.hosts.values()
        a.run("remote", "init", self.url)
        b.run("remote", "join", self.url, "--open-with", str(a.key_file))
        self.stores = {
            name: CliRepository(host.repository, host.top / "root", make=False)
            for name, host in self.hosts.items()
        }
        (top / "elsewhere").mkdir()
        self.elsewhere = Elsewhere(top / "elsewhere", self.url, {"CIUIC_REMOTE_KEY_FILE": str(a.key_file)})

    def commit(self, set_id: str, member: str) -> str:
        """Commit a member of a set named night."""
        store = self.stores[member]
        place = SetMember(id=set_id, name="night", member=member, members=MEMBERS)
        # The ids of both hosts would be the same.
        id_ = f"cs-{MEMBERS.index(member) + 1}{store.count:05x}"
        return str(store.snapshot({b"who": f"{member} {set_id[:2]}".encode()}, id_=id_, set_member=place))

    def upload(self, member: str) -> None:
        self.hosts[member].run("remote", "upload", "--once")

    def states(self) -> list[tuple[str, list[str]]]:
        """Return id and lacking members of each set, as fleet tells them from elsewhere."""
        told: Any = json.loads(self.elsewhere.run("fleet", "list", "--sets", "--json"))
        return [(one["id"], one["lacking"]) for one in told["sets"]]


@pytest.fixture
def two(short_tmp: Path) -> Two:
    return Two(short_tmp)


def test_a_set_is_restored_as_one(two: Two, tmp_path: Path) -> None:
    """A host takes its member of the newest set that is whole in the remote; what lacks a member is named and refused."""
    a, root = two.hosts["a"], two.stores["a"].root
    for member in MEMBERS:
        two.commit(FIRST, member)
    two.commit(SECOND, "a")
    words = ("restore", "-s", "set:night", "-p", str(root / "who"), "-d")
    # Nothing of b is stored: no set is whole.
    two.upload("a")
    assert two.states() == [(SECOND, ["b"]), (FIRST, ["b"])]
    refused = a.fails(*words, str(tmp_path / "no"), code=3)
    assert "missing: b" in refused
    assert not (tmp_path / "no").exists()
    a.run(*words, str(tmp_path / "some"), "--incomplete")
    assert (tmp_path / "some" / "who").read_text() == "a 0b"
    # The older set becomes whole, and is what the name means, also where only this host's repository is read.
    two.upload("b")
    assert two.states() == [(SECOND, ["b"]), (FIRST, [])]
    a.run(*words, str(tmp_path / "own"))
    assert (tmp_path / "own" / "who").read_text() == "a 0a"
    into = tmp_path / "all"
    two.elsewhere.run("restore", "-s", "set:night", "--all", "--all-members", "-d", str(into))
    assert [(into / member / "root" / "who").read_text() for member in MEMBERS] == ["a 0a", "b 0a"]
    one = ("--member", "b", "--all", "-d", str(tmp_path / "b"))
    two.elsewhere.run("restore", "-s", "set:night", *one)
    assert (tmp_path / "b" / "root" / "who").read_text() == "b 0a"
    assert "every byte is right" in two.elsewhere.run("verify", "set:night", "--checksum")
    # A store that does not answer says nothing about the set, and --incomplete helps.
    os.rename(two.top / "nas", two.top / "away")
    assert "cannot be read" in a.fails(*words, str(tmp_path / "no"), code=3)
    os.rename(two.top / "away", two.top / "nas")


@pytest.mark.full
def test_a_member_that_was_forgotten_is_missing_everywhere(two: Two, tmp_path: Path) -> None:
    """Without one member a set is incomplete for hosts and elsewhere; forget --remote of a set gives up all of it."""
    ids = {(set_id, member): two.commit(set_id, member) for set_id in (FIRST, SECOND) for member in MEMBERS}
    for member in MEMBERS:
        two.upload(member)
    a = two.hosts["a"]
    a.run("forget", "--remote", "-y", ids[SECOND, "b"])
    assert two.states() == [(SECOND, ["b"]), (FIRST, [])]
    assert json.loads(two.elsewhere.run("show", "set:0b", "--json"))["lacking"] == ["b"]
    assert json.loads(two.elsewhere.run("show", ids[SECOND, "a"], "--json"))["set"]["whole"] is False
    assert "missing: b" in a.fails("restore", "-s", "set:0b", "--all", "-d", str(tmp_path / "no"), code=3)
    assert "b is missing" in two.elsewhere.run("verify", "set:0b", code=8)
    # Forgotten on a host, it is still in the remote.
    two.hosts["b"].run("forget", "-y", ids[FIRST, "b"])
    assert two.states() == [(SECOND, ["b"]), (FIRST, [])]
    a.run("forget", "--remote", "-y", "set:0a")
    assert two.states() == [(SECOND, ["b"])]
