"""`ciuic remote tier` and `thaw`, run as installed over SeaweedFS behind a proxy that archives as Amazon S3 does.

SeaweedFS keeps storage classes and archives nothing. Behind the proxy an object that was copied to an archive class answers GET with 403 InvalidObjectState until it was restored
(RestoreObject) and looked at a few times.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.cli_repository import Host
from support.object_servers import FaultProxy, SeaweedFS, environment_for_s3, seaweedfs
from support.until import until

ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_REFUSAL = b"<Error><Code>InvalidObjectState</Code><Message>The operation is not valid</Message></Error>"
_EXPIRY = 'ongoing-request="false", expiry-date="Fri, 21 Dec 2029 00:00:00 GMT"'

Answer = tuple[int, list[tuple[str, str]], bytes]


class ArchiveProxy(FaultProxy):
    """Proxy that archives.

    Args:
        endpoint: The store.
        looks: How often an object is looked at before its thaw is done.
    """

    def __init__(self, endpoint: str, looks: int = 2) -> None:
        self.archived: set[str] = set()
        """Paths of objects that cannot be read."""
        self.thawing: dict[str, int] = {}
        self.restores: list[bytes] = []
        """Bodies of the requests to restore."""
        self._looks = looks
        self._state = threading.Lock()
        super().__init__(endpoint)

    def ask(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """Answer as the store would if it archived."""
        place, query = urlsplit(path).path, urlsplit(path).query
        with self._state:
            if method == "POST" and query == "restore":
                self.restores.append(body)
                self.thawing.setdefault(place, self._looks)
                return 202, [], b""
            if method == "GET" and place in self.archived:
                return 403, [], _REFUSAL
        answer = super().ask(method, path, headers, body)
        with self._state:
            if method == "HEAD":
                answer[1].extend(self._restore_header(place))
            storage_class = {name.lower(): value for name, value in headers}.get("x-amz-storage-class")
            if method == "PUT" and answer[0] == 200:
                self.archived.discard(place)
                if storage_class in ARCHIVES:
                    self.archived.add(place)
        return answer

    def _restore_header(self, place: str) -> list[tuple[str, str]]:
        if place not in self.thawing:
            return []
        self.thawing[place] -= 1
        if self.thawing[place] > 0:
            return [("x-amz-restore", 'ongoing-request="true"')]
        self.archived.discard(place)
        return [("x-amz-restore", _EXPIRY)]


__all__ = ["seaweedfs"]

RULE = """
[[remote.tier]]
after = "1s"
storage_class = "GLACIER"
"""


@pytest.fixture
def store(seaweedfs: SeaweedFS) -> Iterator[ArchiveProxy]:
    with ArchiveProxy(seaweedfs.endpoint) as proxy:
        yield proxy


def test_old_data_become_cold_and_are_thawed_for_a_restore(
    short_tmp: Path, seaweedfs: SeaweedFS, store: ArchiveProxy
) -> None:
    """Old data are archived by rule; restore refuses with the command that thaws, and after the thaw brings every byte."""
    host = Host(short_tmp / "one")
    host.env |= environment_for_s3(store.endpoint) | {"XDG_STATE_HOME": str(short_tmp / "state")}
    url = seaweedfs.new_url()
    # Buckets of this server are made by the first PUT.
    seaweedfs.connect("s3://tests/first").put("ready", [b"1"])
    host.run("remote", "init", url)
    old, new = os.urandom(600_000), os.urandom(600_000)
    host.snapshot_of(old, new)
    host.run("remote", "upload", "--once")
    with open(host.config, "a", encoding="utf-8") as file:
        file.write(RULE)
    assert "remote[0].tier[0].storage_class" in host.run("config", "show").stdout.decode()

    second, first = (row.id for row in host.list())
    said = host.json("remote", "tier", "--dry-run")
    assert (store.archived, said["packs"] > 0) == (set(), True)
    done = host.json("remote", "tier")
    assert (done["packs"], done["bytes"]) == (said["packs"], said["bytes"])
    assert len(store.archived) == done["packs"]
    assert "nothing moved" in host.run("remote", "tier").stdout.decode()

    # Another machine, which has the bucket and the key.
    host.env["XDG_CACHE_HOME"] = str(short_tmp / "fresh")
    host.env["CIUIC_REMOTE_KEY_FILE"] = str(host.key_file)
    remote = ("--repo", url)
    assert len(host.json(*remote, "list")["snapshots"]) == 2
    assert host.json(*remote, "verify", "--all")["damaged"] is False
    verified = host.json(*remote, "verify", "--all", "--checksum")
    assert (verified["damaged"], len(verified["archived_packs"])) == (False, done["packs"])

    place = short_tmp / "restored"
    source = str(host.top / "root")
    restore = (*remote, "restore", "-s", first, "-p", source, "-d", str(place))
    refused = host.fails(*restore, code=7)
    assert "archived in the store; nothing was changed" in refused
    assert f"remote thaw {first} -p {source}" in refused
    assert "archived in the store" in host.fails(*restore, "--lazy", "--foreground", code=7)
    assert not place.exists()
    host.run(*remote, "restore", "-s", second, "-p", source, "-d", str(short_tmp / "new"))
    assert (short_tmp / "new" / "root" / "file").read_bytes() == new

    thawed = host.json(*remote, "remote", "thaw", first, "-p", source, "--tier", "bulk", "--days", "3")
    assert (thawed["packs"], thawed["ready"], thawed["bytes"]) == (done["packs"], False, done["bytes"])
    assert thawed["ready_by"]
    assert len(store.restores) == done["packs"]
    assert all(b"<Days>3</Days>" in body and b"Bulk" in body for body in store.restores)
    # Asked by another machine, nothing is asked for again.
    host.env["XDG_STATE_HOME"] = str(short_tmp / "state of another")
    until("the thaw", lambda: host.json(*remote, "remote", "thaw", first)["ready"])
    assert len(store.restores) == done["packs"]
    host.run(*restore)
    assert (place / "root" / "file").read_bytes() == old


def test_tier_needs_a_rule(short_tmp: Path) -> None:
    """Without a rule the command says how to write one."""
    host = Host(short_tmp / "one")
    host.run("remote", "init", f"file://{short_tmp}/nas", "--no-encryption", "-y")
    assert "[[remote.tier]]" in host.fails("remote", "tier", code=2)
    assert "goes with --remote" in host.fails("prune", "--spare-cold", "1d", code=2)
    assert "no thaw" in host.run("remote", "thaw", "--status").stderr.decode()


def test_lost_copy_of_a_table(short_tmp: Path, seaweedfs: SeaweedFS, store: ArchiveProxy) -> None:
    """Without it thaw still finds the archived pack, tier makes the copy again, and a machine that knows nothing reads the snapshot."""
    host = Host(short_tmp / "one")
    host.env |= environment_for_s3(store.endpoint) | {"XDG_STATE_HOME": str(short_tmp / "state")}
    url = seaweedfs.new_url()
    objects = seaweedfs.connect(url)
    # Buckets of this server are made by the first PUT.
    objects.put("ready", [b"1"])
    host.run("remote", "init", url)
    old = os.urandom(600_000)
    host.snapshot_of(old, os.urandom(600_000))
    host.run("remote", "upload", "--once")
    with open(host.config, "a", encoding="utf-8") as file:
        file.write(RULE)
    first = host.list()[-1].id
    packs = host.json("remote", "tier")["packs"]
    tables = {info.name for info in objects.list("tables/")}
    assert len(tables) == packs
    objects.delete(tables)

    def elsewhere(name: str, *words: str, code: int = 0) -> str:
        host.env["XDG_CACHE_HOME"] = str(short_tmp / name)
        return host.run(*words, expect=code).stdout.decode()

    elsewhere("verifies", "verify", "--remote", code=4)
    assert "ciuic remote thaw" in elsewhere("checks", "check", "--remote", code=4)
    archived = set(store.archived)
    thaw = ("--repo", url, "remote", "thaw", first)
    until("the thaw", lambda: "everything can be read" in elsewhere("thaws", *thaw))
    assert len(store.restores) == packs
    restore = (
        "--repo",
        url,
        "restore",
        "-s",
        first,
        "-p",
        str(host.top / "root"),
        "-d",
        str(short_tmp / "back"),
    )
    elsewhere("restores", *restore)
    assert (short_tmp / "back" / "root" / "file").read_bytes() == old
    assert "nothing moved" in elsewhere("moves", "remote", "tier")
    assert {info.name for info in objects.list("tables/")} == tables

    # The thawed copies have expired.
    store.archived, store.thawing = archived, {}
    elsewhere("verifies again", "verify", "--remote")
    elsewhere("checks again", "check", "--remote")
    # On a machine that has read the table before it was lost.
    objects.delete(tables)
    assert f"{packs} pack" in elsewhere("verifies again", "--repo", url, "remote", "thaw", first, "--dry-run")
