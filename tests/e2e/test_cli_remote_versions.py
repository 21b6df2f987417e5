"""The installed command on a locked, versioned bucket full of delete markers and forged versions."""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support import trees
from support.cli_repository import Host
from support.object_servers import Fault, FaultProxy, Request, SeaweedFS, environment_for_s3
from support.remote_host import Elsewhere, RemoteHost, new_remote
from support.restoring import write
from support.versioned_objects import attack

from ciuic.remote.access import add_slot
from ciuic.remote.objects.s3_botocore import S3Client
from ciuic.remote.objects.urls import StoreSettings, parse_url
from ciuic.remote.sealing.key_slots import SlotSecret, make_key_file, show_recovery_key


class AttackedBucket:
    """Bucket with versions in which an attacker overwrote and deleted everything after two snapshots were uploaded."""

    def __init__(self, place: Path, server: SeaweedFS, *, sealed: bool) -> None:
        self.url = server.versioned_url(locked=True)
        self.objects = server.connect(self.url)
        remote = new_remote(self.objects, sealed=sealed)
        secrets = environment_for_s3(server.endpoint)
        if sealed:
            key_file = place / "key"
            add_slot(remote, "file", make_key_file(str(key_file)))
            secrets["CIUIC_REMOTE_KEY_FILE"] = str(key_file)
        self.reader = Elsewhere(place, self.url, secrets)
        self.host = RemoteHost(place / "host", remote, name="node1")
        rng = random.Random(2)
        self.manifests = []
        for turn in range(2):
            write(self.host.root / f"{turn}.bin", rng.randbytes(200_000))
            write(self.host.root / "logs" / "text", b"line %d\n" % turn * 500)
            self.manifests.append((self.host.snapshot().id, trees.manifest(self.host.root)))
            self.host.upload()
        attack(self.objects, random.Random(3))

    def assert_restores(self, *options: str) -> None:
        """Restore both snapshots and compare them bit for bit and by their attributes."""
        for id_, manifest in self.manifests:
            assert not self.reader.differences(id_, self.host.root, manifest, *options)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "in clear"])
def test_a_bucket_full_of_deletions_and_forgeries(tmp_path: Path, seaweedfs: SeaweedFS, sealed: bool) -> None:
    """list, show, verify, diff and restore work behind the attack; after check --repair plain commands do.

    In clear list and restore stand for all.
    """
    bucket = AttackedBucket(tmp_path, seaweedfs, sealed=sealed)
    behind = ["--behind-deletions"]
    # Damaged, or not there any more.
    done = bucket.reader.start("list")
    assert done.returncode in (3, 4)
    assert b"remote" in done.stdout + done.stderr
    first, second = (id_ for id_, _ in bucket.manifests)
    listed = json.loads(bucket.reader.run("list", "--json", *behind))
    assert {snapshot["id"] for snapshot in listed["snapshots"]} == {first, second}
    bucket.assert_restores(*behind)
    if not sealed:
        return
    root = str(bucket.host.root)
    assert "1.bin" in bucket.reader.run("show", second, root, *behind)
    assert "1.bin" in bucket.reader.run("diff", first, second, *behind)
    bucket.reader.run("verify", "--all", "--checksum", *behind)
    assert "deleted or overwritten" in bucket.reader.run("check", *behind, code=4)
    assert "repaired" in bucket.reader.run("check", "--repair", *behind)
    bucket.reader.run("check", *behind)
    bucket.assert_restores()


def test_locks_in_a_bucket_with_object_lock(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    """check --renew-locks has the store refuse the deletion of what is needed for the time that was asked for."""
    bucket = AttackedBucket(tmp_path, seaweedfs, sealed=True)
    bucket.reader.run("check", "--repair", "--behind-deletions")
    told = json.loads(bucket.reader.run("check", "--renew-locks", "30d", "--json"))
    assert told["locked"] > 5
    s3 = S3Client(parse_url(bucket.url), StoreSettings(), environment_for_s3(seaweedfs.endpoint))
    keys = {"Bucket": s3.bucket, "Prefix": s3.key("packs/")}
    until = [
        (
            version["Key"],
            s3.client.get_object_retention(
                Bucket=s3.bucket, Key=version["Key"], VersionId=version["VersionId"]
            ),
        )
        for version in s3.client.list_object_versions(**keys)["Versions"]
    ]
    days = [(reply["Retention"]["RetainUntilDate"] - datetime.now(timezone.utc)).days for _, reply in until]
    assert max(days) == 29
    # A shorter time leaves the longer locks as they are.
    assert json.loads(bucket.reader.run("check", "--renew-locks", "2d", "--json"))["locked"] == told["locked"]
    for key, reply in until:
        assert reply["Retention"]["Mode"] == "GOVERNANCE", key


def test_options_that_cannot_work(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    """A bucket without locks, a store without versions, a local repository and a wrong time are refused with words."""
    bucket = AttackedBucket(tmp_path, seaweedfs, sealed=False)
    done = bucket.reader.run("list", "--stored-before", "2100-01-01")
    assert bucket.manifests[0][0] in done
    # A cache for one time is of no use to another.
    assert not list((bucket.reader.home / ".cache/ciuic/remotes").glob("versions-*"))
    assert "never a remote" in bucket.reader.run("list", "--stored-before", "2020-01-01", code=3)
    assert "2020-13-45" in bucket.reader.run("list", "--stored-before", "2020-13-45", code=2)
    assert "nothing is written" in bucket.reader.run("prune", "--behind-deletions", code=7)
    bucket.reader.url = str(tmp_path / "local")
    assert "URL of a remote" in bucket.reader.run("list", "--behind-deletions", code=2)
    bucket.reader.url = f"file://{tmp_path}/nas"
    assert "cannot be read here" in bucket.reader.run("list", "--behind-deletions", code=2)


def test_a_host_needs_no_right_to_delete(short_tmp: Path, seaweedfs: SeaweedFS) -> None:
    """join, upload, list, verify, check, restore, forget and repair work without it; the removal of a key is refused.

    What `init` and `remote test` leave then is tested in test_proof_of_create_only.py: their races take half a minute here.
    """
    refused = Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
    asked = []

    def fault(request: Request) -> Fault | None:
        deletes = request.method == "DELETE" or (request.method == "POST" and "delete" in request.path)
        if deletes:
            asked.append(request.path)
        return refused if deletes else None

    url = seaweedfs.versioned_url()
    remote = new_remote(seaweedfs.connect(url))
    first = SlotSecret("recovery", bytes(range(32)))
    add_slot(remote, "recovery", first)
    with FaultProxy(seaweedfs.endpoint) as proxy:
        proxy.fault = fault
        host = Host(short_tmp / "one")
        host.env.update(environment_for_s3(proxy.endpoint))
        host.env["XDG_CACHE_HOME"] = str(host.top / "cache")
        host.env["CIUIC_REMOTE_RECOVERY_KEY"] = show_recovery_key(first.reveal())
        host.run("remote", "join", url)
        del host.env["CIUIC_REMOTE_RECOVERY_KEY"]
        snapshot = host.snapshot_of(b"one", b"two")
        host.run("remote", "upload", "--once")
        host.env["CIUIC_REMOTE_KEY_FILE"] = str(host.key_file)
        host.run("--repo", url, "list")
        host.run("--repo", url, "verify", "--all", "--checksum")
        host.run("check", "--remote")
        host.run("check", "--remote", "--repair")
        root = str(host.top / "root")
        host.run("--repo", url, "restore", "-s", snapshot, "-p", root, "-d", str(short_tmp / "there"))
        assert (short_tmp / "there" / "root" / "file").read_bytes() == b"two"
        host.run("forget", "--remote", "-y", snapshot)
        assert not asked
        assert "delete" in host.fails("remote", "keys", "remove", "recovery", "-y", code=7)
        assert asked
