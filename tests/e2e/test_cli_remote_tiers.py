"""`ciuic remote tier` and `thaw`, run as installed over SeaweedFS behind a proxy that archives as Amazon S3 does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.archive_proxy import ArchiveProxy
from support.object_servers import SeaweedFS, environment_for_s3, seaweedfs
from support.remote_commands import Host

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
    while not host.json(*remote, "remote", "thaw", first)["ready"]:
        pass
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
