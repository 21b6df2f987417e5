"""Reading a remote behind deletions and forged versions: what verifies, in bounded time, and nothing else."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from support import trees
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write
from support.versioned_objects import MemoryVersions, VersionedObjects, attack

from ciuic.errors import NotFound, NotPermitted
from ciuic.remote.access import add_slot, remove_slot
from ciuic.remote.documents import LogHello, LogRemove, StoredRound, _encode, encode_log_entry, encode_round
from ciuic.remote.errors import DamagedRemote, PacksElsewhere, WrongKey
from ciuic.remote.object_names import REMOTE_JSON, RoundPart, log_entry_name, new_hex_id, round_name
from ciuic.remote.objects.model import MAX_KEPT_VERSIONS, group_versions
from ciuic.remote.reading.versions import SoundObjects, open_remote_versions
from ciuic.remote.sealing.key_slots import MAX_PASSPHRASE_WORK_KIB, SlotSecret, passphrase_secret
from ciuic.remote.sealing.sealer import MasterKey, Sealer, add_check, xxh3_check
from ciuic.restore import execute, plan_restore

SECRET = SlotSecret("key-file", bytes(range(32)))


class Attacked:
    """Remote in a bucket with versions, with two snapshots of one host and one of a host of its own identity."""

    def __init__(self, place: Path, *, sealed: bool = True) -> None:
        self.place = place
        self.bucket = VersionedObjects()
        self.secrets = [SECRET] if sealed else []
        self.remote = new_remote(self.bucket, sealed=sealed)
        if sealed:
            add_slot(self.remote, "host", SECRET)
        self.hosts = [
            RemoteHost(place / name, self.remote, name=name, own_identity=own)
            for name, own in (("one", False), ("own", True))
        ]
        rng = random.Random(7)
        self.trees = {}
        for host in self.hosts:
            for turn in range(2):
                write(host.root / f"{turn}", rng.randbytes(9 * BLOCK))
                write(host.root / "folder" / "text", b"words %d " % turn * 900)
                self.trees[host.snapshot().id] = (host, trees.manifest(host.root))
                host.upload()

    def assert_restores(self, before_ns: int | None = None, expected: int = 4) -> None:
        """Restore every snapshot behind deletions and compare the trees."""
        found = open_remote_versions(self.bucket.versions(), self.secrets, before_ns=before_ns)
        with reading(found.remote, self.place / "cache" / os.urandom(4).hex()) as opened:
            assert len(opened.snapshots.names()) == expected
            for repository in opened.repositories:
                for snapshot in repository.snapshots.load_all()[0]:
                    host, manifest = self.trees[snapshot.id]
                    there = Path(tempfile.mkdtemp(dir=self.place))
                    plan = plan_restore(
                        repository, snapshot, [os.fsencode(host.root)], dest=os.fsencode(there)
                    )
                    assert execute(plan).complete
                    trees.assert_same(manifest, trees.manifest(there / host.root.name))


@pytest.mark.parametrize(("sealed", "seed"), [(True, 0), (True, 1), (False, 2)])
def test_everything_is_restored_behind_an_attack(tmp_path: Path, sealed: bool, seed: int) -> None:
    """After every name was overwritten with forgeries and deleted, all snapshots come back as they were."""
    remote = Attacked(tmp_path, sealed=sealed)
    attack(remote.bucket, random.Random(seed))
    remote.assert_restores()


def test_everything_is_restored_after_a_collection(tmp_path: Path) -> None:
    """Rounds of collections are no more there for those who look behind deletions, by listings or by name."""
    remote = Attacked(tmp_path)
    sealer = remote.remote.sealer
    parts: tuple[RoundPart, ...] = ("begun", "final", "done")
    for part in parts:
        remote.bucket.put(
            round_name(0, part), [encode_round(sealer, 0, part, StoredRound(nonce=new_hex_id()))]
        )
    attack(remote.bucket, random.Random(3))
    remote.assert_restores()


def test_in_clear_time_tells_what_was_forged_well(tmp_path: Path) -> None:
    """Without a key anybody can give snapshots up; what was stored before that time shows them."""
    remote = Attacked(tmp_path, sealed=False)
    before = remote.bucket.now_ns + 1
    sealer = Sealer(bytes.fromhex(remote.remote.id), None)
    names = tuple(info.name for info in remote.bucket.list("manifests/"))
    writer = new_hex_id()
    hello = LogHello(nonce=new_hex_id(), host="x", repository=new_hex_id())
    for number, entry in enumerate((hello, LogRemove(nonce=new_hex_id(), manifests=names))):
        remote.bucket.put(log_entry_name(writer, number), [encode_log_entry(sealer, writer, number, entry)])
    remote.assert_restores(expected=2)
    remote.assert_restores(before)


def test_ten_thousand_forged_versions(tmp_path: Path) -> None:
    """A name with 10,000 forged versions costs a listing and one read more, and its oldest version is found."""
    remote = Attacked(tmp_path)
    bucket = remote.bucket
    rng = random.Random(1)
    for kind in ("packs/data/", "w/", "manifests/", "keys/", "remote.json"):
        name = next(info.name for info in bucket.list(kind))
        for _ in range(10_000):
            bucket.put(name, [rng.randbytes(64)])
        bucket.delete([name])
    before = bucket.reads
    remote.assert_restores()
    assert bucket.reads - before < 1_000
    group = next(one for one in group_versions(bucket.versions().list("keys/host")))
    assert (group.total, len(group.versions)) == (10_001, MAX_KEPT_VERSIONS)


def test_no_version_is_sound(tmp_path: Path) -> None:
    """An object of which every version is forged is told by name, with the number of versions, and never returned."""
    remote = Attacked(tmp_path)
    bucket = remote.bucket
    name = next(info.name for info in bucket.list("manifests/"))
    bucket.stored[name] = []
    for _ in range(500):
        bucket.put(name, [os.urandom(100)])
    objects = open_remote_versions(bucket.versions(), remote.secrets).objects
    with pytest.raises(
        DamagedRemote, match=r"none of 500 versions verifies \(200 different ones were tried\)"
    ):
        objects.get_ranges(name, [(0, 10)])
    with pytest.raises(NotPermitted):
        objects.put(name, [b""])


def test_what_was_stored_later_is_left_out(tmp_path: Path) -> None:
    """Snapshots that a user with the key gave up are there as of a time before; those that came later are not."""
    remote = Attacked(tmp_path)
    before = remote.bucket.now_ns + 1
    remote.hosts[0].snapshot()
    remote.hosts[0].upload()
    with pytest.raises(AssertionError):
        remote.assert_restores()
    remote.assert_restores(before)
    with pytest.raises(NotFound):
        open_remote_versions(remote.bucket.versions(), remote.secrets, before_ns=1)


@pytest.mark.parametrize("sealed", [True, False])
def test_packs_elsewhere_are_refused_behind_deletions(tmp_path: Path, sealed: bool) -> None:
    """A remote.json that names another place for the packs is refused where it is the remote's own, and ends no rescue where it was put over it."""
    remote = Attacked(tmp_path, sealed=sealed)
    stored = msgspec.structs.replace(remote.remote.stored, version=2, packs_url="s3://locked")
    # Nobody else has the key of a sealed remote.
    forged = _encode(stored, MasterKey.generate() if sealed else None)
    remote.bucket.put(REMOTE_JSON, [forged])
    remote.assert_restores()
    remote.bucket.stored[REMOTE_JSON] = []
    remote.bucket.put(REMOTE_JSON, [_encode(stored, remote.remote.master)])
    with pytest.raises(PacksElsewhere):
        open_remote_versions(remote.bucket.versions(), remote.secrets)


def test_slots_that_were_replaced_or_removed(tmp_path: Path) -> None:
    """A slot is found behind a forged version and behind its removal; a wrong key and a remote that is said to be in clear are refused."""
    remote = Attacked(tmp_path)
    bucket = remote.bucket
    add_slot(remote.remote, "other", SlotSecret("key-file", bytes(32)))
    remove_slot(remote.remote, "host")
    bucket.put("keys/host", [bucket.get("keys/other")])
    found = open_remote_versions(bucket.versions(), remote.secrets)
    assert found.objects.slot[0] == "keys/host"
    with pytest.raises(WrongKey, match="no key opens"):
        open_remote_versions(bucket.versions(), [SlotSecret("key-file", b"x" * 32)])
    with pytest.raises(WrongKey, match="a passphrase or key is needed"):
        open_remote_versions(bucket.versions(), [])
    clear = Attacked(tmp_path / "clear", sealed=False)
    with pytest.raises(WrongKey, match="in all versions"):
        open_remote_versions(clear.bucket.versions(), remote.secrets)


def test_a_passphrase_is_not_tried_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that were made up for a passphrase end the search after a number of derivations."""
    remote = Attacked(tmp_path)
    derived = []

    def refuse(slot: object, remote_id: bytes, secret: SlotSecret) -> None:
        derived.append(slot)
        raise WrongKey("no")

    monkeypatch.setattr("ciuic.remote.reading.versions.unwrap_master_key", refuse)
    slot = remote.bucket.get("keys/host")
    kdf = b'"kind":"passphrase","kdf":{"name":"argon2id","memory_kib":262144,"passes":3,"lanes":4,'
    forged = slot.replace(b'"kind":"key-file","kdf":{"name":"hkdf-sha256",', kdf)
    assert forged != slot
    body = forged[: forged.index(b',"check"')] + b"}"
    for number in range(200):
        named = body.replace(b'"slot":"host"', b'"slot":"s%d"' % number)
        remote.bucket.put(f"keys/s{number}", [add_check(named, xxh3_check)])
    with pytest.raises(WrongKey, match="too many versions"):
        open_remote_versions(remote.bucket.versions(), [passphrase_secret("a passphrase")])
    assert len(derived) == MAX_PASSPHRASE_WORK_KIB // (3 * 262144)


def test_planted_slots_lock_no_key_out(tmp_path: Path) -> None:
    """A slot opens behind thousands of planted ones that sort before it, in a remote that was deleted."""
    remote = Attacked(tmp_path)
    slot = remote.bucket.get("keys/host")
    body = slot[: slot.index(b',"check"')] + b"}"
    for number in range(1500):
        named = body.replace(b'"slot":"host"', b'"slot":"a-%d"' % number)
        remote.bucket.put(f"keys/a-{number}", [add_check(named, xxh3_check)])
    remote.bucket.delete([info.name for info in remote.bucket.list("keys/")])
    assert open_remote_versions(remote.bucket.versions(), remote.secrets).objects.slot[0] == "keys/host"


def test_versions_are_listed_once_for_many_names(tmp_path: Path) -> None:
    """A name that a listing told of is read without another listing."""
    remote = Attacked(tmp_path)
    objects = open_remote_versions(remote.bucket.versions(), remote.secrets).objects
    assert isinstance(objects, SoundObjects)
    names = [info.name for info in objects.list("packs/")]
    listed = remote.bucket.listed
    for name in names:
        assert objects.tail(name, 10) == remote.bucket.tail(name, 10)
        assert objects.get(name) == remote.bucket.get(name)
    assert remote.bucket.listed == listed
    assert isinstance(remote.bucket.versions(), MemoryVersions)
