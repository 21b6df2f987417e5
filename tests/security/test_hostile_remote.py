"""A bucket that somebody else writes to, end to end: refused in words, or read from another copy, never wrong content.

Who can write to the bucket can delete everything, and bring back an older state for a machine that never saw a later one;
nothing else.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_host import BLOCK, RemoteHost, flip_object, reading
from support.restoring import write

from ciuic.errors import CiuicError, Damaged
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote, add_slot, init_remote, open_remote, require_sealed
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.log_reader import RolledBack
from ciuic.remote.object_names import REMOTE_JSON, new_pack_ref, pack_name
from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import passphrase_secret, recovery_secret, show_recovery_key
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.repository import Repository
from ciuic.restore import execute, plan_restore
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.types import SnapshotId

WORDS = "correct horse battery staple"
KEY = recovery_secret(show_recovery_key(bytes(range(32))))
"""Key that opens the remote at once: a passphrase takes a second."""
WINDOW_BYTES = 32
"""Any run of 64 bytes has one that begins at a multiple of this."""


class World:
    """A sealed remote in a bucket, with three snapshots of one host and one of another."""

    def __init__(self, place: Path, url: str) -> None:
        self.place = place
        self.url = url
        self.objects: Objects = open_objects(url, make=True) if url.startswith("file") else open_objects(url)
        self.remote: Remote = init_remote(self.objects, master=MasterKey.generate(), block_size=BLOCK)
        add_slot(self.remote, "recovery", KEY)
        self.trees: dict[str, tuple[RemoteHost, dict[Path, bytes]]] = {}
        self.states: list[dict[str, bytes]] = []
        self.hosts = [RemoteHost(place / name, self.remote, name=name) for name in ("alpha", "beta")]
        rng = random.Random(7)
        for host, number in ((self.hosts[0], 0), (self.hosts[0], 1), (self.hosts[1], 0), (self.hosts[0], 2)):
            write(host.root / f"secret-name-{number}", rng.randbytes(12 * BLOCK + 77))
            write(
                host.root / "confidential-folder" / "confidential-text",
                b"the quick brown fox %d " % number * 3000,
            )
            id_ = host.snapshot().id
            files = {
                path.relative_to(host.root): path.read_bytes()
                for path in host.root.rglob("*")
                if path.is_file()
            }
            self.trees[str(id_)] = host, files
            host.upload()
            self.states.append(self.state())
        assert all(self.judge(place / "known").values())

    def again(self, place: Path) -> World:
        """Return the world as it was made, with hosts and the cache of a reader who has seen everything in another directory."""
        self.bring_back(self.states[-1])
        shutil.copytree(self.place / "known", place / "known")
        again = copy.copy(self)
        again.place = place
        again.hosts = [host.copy(place / host.name, self.remote) for host in self.hosts]
        return again

    def names(self, prefix: str = "") -> list[str]:
        return sorted(info.name for info in self.objects.list(prefix))

    def state(self) -> dict[str, bytes]:
        return {name: bytes(self.objects.get(name)) for name in self.names()}

    def bring_back(self, state: dict[str, bytes]) -> None:
        """Make the bucket what it was."""
        self.objects.delete([name for name in self.names() if name not in state])
        for name, data in state.items() - self.state().items():
            self.objects.put(name, [data])

    def swap(self, one: str, other: str) -> None:
        first, second = bytes(self.objects.get(one)), bytes(self.objects.get(other))
        self.objects.put(one, [second])
        self.objects.put(other, [first])

    def judge(self, cache: Path) -> dict[str, bool]:
        """Restore every snapshot; assert that nothing but its content comes back; return which came back whole."""
        remote = open_remote(self.objects, [KEY])
        whole = dict.fromkeys(self.trees, False)
        with reading(remote, cache) as opened:
            for id_ in opened.snapshots.ids():
                try:
                    repository = opened.repository_of([id_])
                    whole[id_] = self._restore(repository, id_)
                except Damaged:
                    continue
        return whole

    def _restore(self, repository: Repository, id_: SnapshotId) -> bool:
        host, files = self.trees[id_]
        there = Path(tempfile.mkdtemp(dir=self.place))
        snapshot = repository.snapshots.load(id_)
        result = execute(
            plan_restore(repository, snapshot, [os.fsencode(host.root)], dest=os.fsencode(there))
        )
        root = there / host.root.name
        found = {
            path.relative_to(root): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.name != os.fsdecode(JOURNAL_NAME)
        }
        assert found.items() <= files.items()
        assert not result.complete or found == files
        return result.complete


@pytest.fixture(scope="module", params=["memory", pytest.param("file", marks=pytest.mark.full)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    name = f"hostile-{os.urandom(6).hex()}"
    place = tmp_path_factory.mktemp(request.param)
    yield World(place, f"memory://{name}" if request.param == "memory" else f"file://{place}/nas")
    forget_bucket(name)


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    return made.again(tmp_path)


def caches(world: World) -> list[Path]:
    """Return two caches: an empty one, and that of a reader who has seen everything."""
    return [world.place / "new", world.place / "known"]


def test_nothing_of_the_content_is_in_the_bucket(world: World) -> None:
    """No file name, no directory name and no run of 64 bytes of any file is found in any object or name."""
    state = world.state()
    everything = b"\n".join([*state.values(), *(name.encode() for name in state)])
    for host, files in world.trees.values():
        for path, content in files.items():
            for part in (*path.parts, str(host.root)):
                assert os.fsencode(part) not in everything
            for start in range(0, len(content) - WINDOW_BYTES, WINDOW_BYTES):
                assert content[start : start + WINDOW_BYTES] not in everything
    # The same search finds what is there.
    assert b"alpha" in everything


@pytest.mark.parametrize("kind", ["data", "meta"])
@pytest.mark.parametrize("way", ["swap", "cut", "rename", "other kind", "zeros"])
def test_packs_are_exchanged(world: World, kind: str, way: str) -> None:
    """Packs that were swapped, cut, renamed, put in the other kind's place or emptied give nothing wrong."""
    known = caches(world)
    first, second, *_ = world.names(f"packs/{kind}/")
    data = bytes(world.objects.get(first))
    if way == "swap":
        world.swap(first, second)
    elif way == "cut":
        world.objects.put(first, [data[: 2 * len(data) // 3]])
    elif way == "rename":
        world.objects.put(pack_name(new_pack_ref("data" if kind == "data" else "meta")), [data])
        world.objects.delete([first])
    elif way == "other kind":
        world.swap(first, world.names(f"packs/{'meta' if kind == 'data' else 'data'}/")[0])
    else:
        world.objects.put(first, [bytes(len(data))])
    # A reader who has the trees in its cache may have them whole; a new one cannot.
    for cache in known:
        whole = world.judge(cache)
        assert not all(whole.values()) or (kind == "meta" and cache == known[1])
    with reading(world.remote, world.place / "third") as opened:
        damages = verify_snapshots(opened.repositories[0], checksum=True).damages
        assert {damage.kind for damage in damages}


def test_a_deleted_pack_that_comes_back_is_harmless(world: World) -> None:
    """Packs and manifests of a collection long ago that are put back change nothing that is read."""
    known = caches(world)
    before = world.state()
    (gone, *_) = world.trees
    policy = CollectionPolicy(young_ns=0)
    with reading(world.remote, known[1]) as opened:
        give_up_snapshots(opened, resolve_snapshots(opened, [gone]), host="operator")
        (done,) = collect_remote(opened, host="operator", policy=policy)
    deleted = {name: data for name, data in before.items() if name not in world.names()}
    assert len(deleted) >= len(done.manifests) == 1
    for name, data in deleted.items():
        world.objects.put(name, [data])
    for cache in known:
        assert world.judge(cache) == {id_: id_ != gone for id_ in world.trees}


def test_manifests_are_exchanged(world: World) -> None:
    """Two manifests in one another's place are refused, and so is an older one under a newer name."""
    known = caches(world)
    one, other, *rest = world.names("manifests/")
    world.swap(one, other)
    # Manifests are cached by their digest, which the log has: who has seen them reads them as they were.
    assert all(world.judge(known[1]).values())
    whole = world.judge(known[0])
    assert sum(whole.values()) == len(rest) == 2
    with reading(world.remote, world.place / "third") as opened:
        loaded, unreadable = opened.snapshots.load_all()
        assert (len(loaded), len(unreadable)) == (2, 2)
        assert all("is not the one that was committed" in one.reason for one in unreadable)


def entries(world: World) -> list[list[str]]:
    """Return the names of the entries of each log, in order."""
    logs: dict[str, list[str]] = {}
    for name in world.names("w/"):
        logs.setdefault(name.split("/")[1], []).append(name)
    return sorted(logs.values(), key=len, reverse=True)


@pytest.mark.parametrize("way", ["same log", "other log", "other round", "copied behind"])
def test_log_entries_are_exchanged(world: World, way: str) -> None:
    """An entry in another place does not open for any reader, and counts for nothing."""
    long, short = entries(world)
    if way == "same log":
        world.swap(long[1], long[3])
    elif way == "other log":
        world.swap(long[1], short[1])
    elif way == "other round":
        world.objects.put("gc/0000000000", [bytes(world.objects.get(long[0]))])
    else:
        last = int(long[-1][-10:])
        world.objects.put(f"{long[-1][:-10]}{last + 1:010}", [bytes(world.objects.get(long[1]))])
    if way == "other round":
        # Rounds are read by those who write and collect.
        with pytest.raises(DamagedRemote, match="gc/"):
            world.hosts[0].upload()
    else:
        _is_passed_over(world)


def _is_passed_over(world: World) -> None:
    """Readers see whole snapshots alone, and are told of a damaged log; nothing is deleted."""
    whole = world.judge(world.place / "new")
    assert sum(whole.values()) > 0
    with reading(world.remote, world.place / "new") as opened:
        assert opened.log_damage
        with pytest.raises(DamagedRemote, match="w/"):
            collect_remote(opened, host="operator")


@pytest.mark.parametrize("way", ["entry", "log", "everything"])
def test_an_older_state_is_noticed(world: World, way: str) -> None:
    """Who knows the newest entry refuses a bucket without it; others read what there was, and nothing wrong."""
    new, known = caches(world)
    long, _ = entries(world)
    if way == "entry":
        world.objects.delete(long[-1:])
    elif way == "log":
        world.objects.delete(long)
    else:
        world.bring_back(world.states[0])
    with pytest.raises(RolledBack, match="older than it was"):
        world.judge(known)
    with pytest.raises(RolledBack, match="older than it was"):
        world.hosts[0].upload()
    with pytest.raises(RolledBack), reading(world.remote, known) as opened:
        collect_remote(opened, host="operator")
    whole = world.judge(new)
    assert 0 < sum(whole.values()) < len(whole)


def test_an_entry_is_lost(world: World) -> None:
    """A gap in a log is noticed, also by a machine that never saw it."""
    long, _ = entries(world)
    world.objects.delete([long[1]])
    _is_passed_over(world)


@pytest.mark.parametrize("way", ["made in clear", "flag", "block size", "older copy"])
def test_remote_json_is_replaced(world: World, tmp_path: Path, way: str) -> None:
    """A remote.json in clear, or with another field, is refused with a key; without one where encryption is configured."""
    data = bytes(world.objects.get(REMOTE_JSON))
    if way in ("made in clear", "older copy"):
        place = open_objects(f"memory://{os.urandom(6).hex()}")
        other = init_remote(
            place, master=None if way == "made in clear" else MasterKey.generate(), block_size=BLOCK
        )
        data = bytes(other.objects.get(REMOTE_JSON))
    elif way == "flag":
        data = data.replace(b'"sealed":true', b'"sealed":false')
    else:
        data = data.replace(b'"block_size":4096', b'"block_size":8192')
    assert data != world.objects.get(REMOTE_JSON)
    world.objects.put(REMOTE_JSON, [data])
    with pytest.raises((WrongKey, DamagedRemote)):
        open_remote(world.objects, [KEY])
    with pytest.raises((WrongKey, DamagedRemote)):
        require_sealed(open_remote(world.objects, []))


@pytest.mark.parametrize("way", ["own key", "other remote", "flipped", "gone"])
def test_a_key_slot_is_replaced(world: World, way: str) -> None:
    """A slot of another master key, of another remote with the same passphrase, or a damaged one opens nothing."""
    world.objects.delete(world.names("keys/"))
    add_slot(world.remote, "words", passphrase_secret(WORDS))
    (name,) = world.names("keys/")
    if way == "flipped":
        flip_object(world.objects, name, -40)
    elif way == "gone":
        world.objects.delete([name])
    else:
        place = open_objects(f"memory://{os.urandom(6).hex()}")
        other = init_remote(place, master=MasterKey.generate(), block_size=BLOCK)
        add_slot(other, "words", passphrase_secret(WORDS if way == "other remote" else "another"))
        world.objects.put(name, [bytes(other.objects.get(name))])
    with pytest.raises((WrongKey, DamagedRemote)) as caught:
        open_remote(world.objects, [passphrase_secret(WORDS)])
    assert isinstance(caught.value, CiuicError)
    assert caught.value.message
