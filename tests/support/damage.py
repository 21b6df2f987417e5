"""Damage to every structure of a repository, and the judgement of the result.

`Repo` makes a small repository that has all structures: sealed packs and unsealed ones, trees of several
levels, block maps of two, a link table, attributes in a chunk, numbers as planes, beside their twins and as
differences from those, marks, an index. `structures` says where each lies; `plant` damages one; `judge`
checks every promise on what is left, and raises AssertionError where one is broken.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from support import trees
from support.restoring import take, write

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import CollectionRefused, prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Identity, Repository, Walker
from ciuic.repository import pack_format as pf
from ciuic.repository.byte_planes import Widening
from ciuic.repository.byte_planes_math import BFLOAT16
from ciuic.repository.compression import Codec, Content, TwinBase
from ciuic.repository.config import CONFIG_NAMES, read_config
from ciuic.repository.index_database import INDEX_NAME
from ciuic.repository.model import ChunkLocation
from ciuic.repository.pack_directory import Packs
from ciuic.repository.tree_format import name_level
from ciuic.restore import execute, plan_restore
from ciuic.retention import RetentionPolicy
from ciuic.types import ChunkId, SnapshotId

BLOCK = 4096
_BORDER_NAMES = ((2, 2), (1, 4), (0, 20))
"""Pairs of (level of a border name, number of such names): few names that make a tree of three levels."""
_DUPLICATE = "ffffffff0"
# The mark of an unfinished restore.
_JOURNAL = b".ciuic-restore"
_KEEP_LAST = RetentionPolicy(keep_within_seconds=0, keep_last=1)


class Structure(NamedTuple):
    """Structure of a repository: a whole file, or a range of one."""

    kind: str
    file: Path
    """Path relative to the repository."""
    start: int = 0
    end: int = -1
    """End of the range; -1 for the whole file."""


@dataclass
class Made:
    """Repository as it was before any damage."""

    top: Path
    repository: Path
    root: Path
    older_index: Path
    """Copy of the index from before the last snapshot."""
    snapshots: list[SnapshotId] = field(default_factory=list)
    manifests: dict[SnapshotId, trees.Manifest] = field(default_factory=dict)
    structures: list[Structure] = field(default_factory=list)
    keyed: bool = False
    """True if chunks are named by keyed BLAKE3."""


def make(top: Path, identity: Identity | None = None) -> Made:
    """Make two snapshots that share most of their content; the first is marked."""
    root = top / "root"
    dice = random.Random(7)
    write(root / "noise", dice.randbytes(9 * BLOCK + 5))
    write(root / "text", b"all work and no play " * 3000)
    write(root / "two names", dice.randbytes(2 * BLOCK))
    (root / "many").mkdir()
    # More than 1024 blocks: two levels of map, four chunks.
    with open(root / "sparse", "wb") as file:
        for at in (0, 500, 1100, 1200):
            os.pwrite(file.fileno(), dice.randbytes(BLOCK), at * BLOCK)
    os.link(root / "two names", root / "many" / "another")
    os.setxattr(root / "noise", "trusted.long", dice.randbytes(3000))
    os.symlink("noise", root / "symlink")
    made = Made(top, top / "repository", root, top / "older-index", keyed=identity is not None)
    with Repository.create(made.repository, block_size=BLOCK, identity=identity) as repository:
        for name in _names_with_borders(int(read_config(str(made.repository)).seed, 16)):
            os.symlink(b"nowhere", os.fsencode(root / "many") + b"/" + name)
        bases = _store_numbers(repository, root, dice)
        _take(made, repository)
    _copy_index(made)
    with Repository.open(made.repository) as repository:
        # Fills the existing packs, so that they are sealed.
        with repository.writer(pack_bytes=1) as writer:
            writer.put_chunk(dice.randbytes(BLOCK))
            writer.put_xattrs([(b"user.filler", dice.randbytes(5000))])
            writer.flush()
        write(root / "changed", dice.randbytes(3 * BLOCK))
        _store_numbers(repository, root, dice, bases)
        _take(made, repository)
        with repository.writer() as writer:
            writer.set_marks(made.snapshots[0], hold=True, reason="the good one")
            writer.set_marks(made.snapshots[1], tags=["second"])
    made.structures = list(_structures(made))
    return made


def _store_numbers(
    repository: Repository, root: Path, dice: random.Random, bases: list[ChunkId] | None = None
) -> list[ChunkId]:
    """Store a file of numbers whose blocks the repository has with codecs before any snapshot of it.

    With ``bases``, store it as differences from the earlier file; without, half of it beside 16-bit numbers
    in a file of their own.
    """
    path = root / "numbers"
    if bases is None:
        numbers = [dice.gauss(0, 0.02) for _ in range(2 * BLOCK // 4)]
    else:
        numbers = [number * 1.0001 for number in struct.unpack(f"<{2 * BLOCK // 4}f", path.read_bytes())]
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    write(path, data)
    blocks = [data[:BLOCK], data[BLOCK:]]
    with repository.writer() as writer:
        if bases:
            codecs = [Codec("difference", 4, base) for base in bases]
        else:
            upper_halves = b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4))
            write(root / "halves", upper_halves)
            base = writer.put_chunks([Content(upper_halves, codec=Codec("planes", 2))])[0]
            twin = TwinBase(base, Widening(BFLOAT16, BLOCK // 4))
            codecs = [Codec("planes", 4), Codec("twin", 4, twin=twin)]
        contents = [Content(block, codec=codec) for block, codec in zip(blocks, codecs, strict=True)]
        stored = writer.put_chunks(contents)
        writer.flush()
    return stored


def _names_with_borders(seed: int) -> Iterator[bytes]:
    """Return names that end leaves and nodes of this repository's trees at the chosen positions."""
    wanted = dict(_BORDER_NAMES)
    number = 0
    while any(wanted.values()):
        name = b"name-%d" % number
        level = min(2, name_level(name, seed))
        if wanted[level]:
            wanted[level] -= 1
            yield name
        number += 1


def _take(made: Made, repository: Repository) -> None:
    snapshot = take(repository, made.root)
    made.snapshots.append(snapshot.id)
    made.manifests[snapshot.id] = trees.manifest(made.root)


def _copy_index(made: Made) -> None:
    shutil.copy(made.repository / INDEX_NAME, made.older_index)


# --- positions of all structures


def _structures(made: Made) -> Iterator[Structure]:
    for name in (*CONFIG_NAMES, "lock", INDEX_NAME):
        yield Structure({INDEX_NAME: "index", "lock": "lock"}.get(name, "config copy"), Path(name))
    for id_ in made.snapshots:
        yield Structure("snapshot file", Path("snapshots") / id_)
        yield Structure("marks", Path("marks") / id_)
    with Repository.open(made.repository) as repository:
        packs = Packs(str(made.repository / "packs"), bytes.fromhex(repository.id), repository.config.hash)
        for pack in repository.packs():
            yield from _pack_structures(packs, pack.number, pack.sealed)
        yield from _chunk_structures(made, repository)


def _pack_path(number: int) -> Path:
    return Path("packs") / f"{number:016x}.pack"


def _pack_structures(packs: Packs, number: int, sealed: bool) -> Iterator[Structure]:
    file, state = _pack_path(number), "sealed" if sealed else "open"
    yield Structure(f"{state} pack", file)
    yield Structure("pack header", file, 0, pf.HEADER_BYTES)
    for segment in packs.scan(number):
        bases = [at for at, record in enumerate(segment.records, 1) if record.base]
        table = pf.table_bytes(len(segment.records), len(bases))
        yield Structure(
            f"segment head, {state}", file, segment.offset, segment.offset + pf.SEGMENT_HEAD_BYTES
        )
        first = segment.offset + pf.SEGMENT_HEAD_BYTES
        yield Structure(f"record, {state}", file, first, first + pf.RECORD_BYTES)
        # No stretch stands before the first.
        if bases:
            at = first + bases[0] * pf.RECORD_BYTES
            yield Structure("record of a base", file, at, at + pf.RECORD_BYTES)
        yield Structure(
            f"segment checksum, {state}", file, segment.offset + table - 8, segment.offset + table
        )
    if sealed:
        end = packs.size(number)
        yield Structure("footer records", file, packs.footer_offset(number), end - pf.TRAILER_BYTES)
        yield Structure("footer trailer", file, end - pf.TRAILER_BYTES, end)
    packs.forget(number)


def _chunk_structures(made: Made, repository: Repository) -> Iterator[Structure]:
    """Return the payload ranges of each kind of chunk, nodes by their level, each kind a few times."""
    seen: dict[str, int] = {}
    for id_ in made.snapshots:
        for reached in Walker(repository).walk(repository.snapshots.load(id_)):
            kind = reached.kind
            if kind in ("tree", "links", "map"):
                kind += f" node, level {repository.chunks.get(reached.id)[3]}"
            elif repository.chunks.locate(reached.id).flags & pf.FLAG_PLANES:
                kind += _how_coded(made, repository.chunks.locate(reached.id))
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > 3:
                continue
            place = repository.chunks.locate(reached.id)
            yield Structure(
                f"payload: {kind}", _pack_path(place.pack), place.offset, place.offset + place.stored_bytes
            )


def _how_coded(made: Made, place: ChunkLocation) -> str:
    if not place.base:
        return ", planes"
    widened = (made.repository / _pack_path(place.pack)).read_bytes()[place.offset + 1]
    return ", beside its twin" if widened else ", difference"


# --- damage

STRETCH_DAMAGES = ("flip", "zeros", "rubbish", "truncation", "swap")
FILE_DAMAGES = ("flip", "truncation", "missing", "empty", "swap", "duplicate", "stale")


def damages(structure: Structure) -> tuple[str, ...]:
    """Return the damages that can be done to the structure."""
    return FILE_DAMAGES if structure.end < 0 else STRETCH_DAMAGES


def plant(made: Made, copy: Path, structure: Structure, damage: str, dice: random.Random) -> bool:
    """Damage ``copy``, a copy of the repository; return False if this changes nothing here."""
    file = copy / structure.file
    before = file.read_bytes()
    if structure.end < 0:
        return _plant_in_file(made, copy, file, before, damage, dice, structure)
    body = bytearray(before)
    start, end = structure.start, structure.end
    if damage == "flip":
        body[dice.randrange(start, end)] ^= 1 << dice.randrange(8)
    elif damage == "zeros":
        body[start:end] = bytes(end - start)
    elif damage == "rubbish":
        body[start:end] = dice.randbytes(end - start)
    elif damage == "truncation":
        del body[dice.randrange(start, end) :]
    else:
        _swap_stretch(made, copy, structure, body)
    file.write_bytes(body)
    return bytes(body) != before


def _swap_stretch(made: Made, copy: Path, structure: Structure, body: bytearray) -> None:
    """Overwrite the range with another structure of the same kind."""
    for other in made.structures:
        if other.kind == structure.kind and other != structure:
            data = (made.repository / other.file).read_bytes()[other.start : other.end]
            length = min(len(data), structure.end - structure.start)
            if data[:length] != body[structure.start : structure.start + length]:
                body[structure.start : structure.start + length] = data[:length]
                return


def _plant_in_file(
    made: Made,
    copy: Path,
    file: Path,
    before: bytes,
    damage: str,
    dice: random.Random,
    structure: Structure,
) -> bool:
    if damage in ("flip", "truncation", "empty"):
        if not before:
            return False
        body = bytearray(before)
        if damage == "flip":
            body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
        else:
            del body[dice.randrange(len(body)) if damage == "truncation" else 0 :]
        file.write_bytes(body)
        return True
    if damage == "missing":
        file.unlink()
        return True
    if damage == "swap":
        return _swap_files(copy, file, structure)
    if damage == "duplicate":
        return _duplicate(file, structure)
    if structure.kind == "index":
        shutil.copy(made.older_index, file)
        return True
    return False


def _swap_files(copy: Path, file: Path, structure: Structure) -> bool:
    others = sorted(path for path in file.parent.iterdir() if path.is_file() and path.name != file.name)
    if structure.kind in ("config copy", "index", "lock"):
        # The damage gives the same bytes, or this structure is the only one of its kind.
        return False
    if not others:
        return False
    data = others[0].read_bytes()
    others[0].write_bytes(file.read_bytes())
    file.write_bytes(data)
    return True


def _duplicate(file: Path, structure: Structure) -> bool:
    if structure.kind.endswith("pack"):
        file.with_name(f"0000000{_DUPLICATE}.pack").write_bytes(file.read_bytes())
    elif structure.kind in ("snapshot file", "marks"):
        file.with_name(f"cs-{_DUPLICATE}").write_bytes(file.read_bytes())
    else:
        return False
    return True


# --- checks afterwards


_HARMLESS = (("marks", "duplicate"), ("index", "flip"), ("index", "truncation"))


def harmless(structure: Structure, damage: str) -> bool:
    """Return whether the damage loses nothing and need not be reported.

    The lock holds no facts, a spare file of marks means nothing, and SQLite does not notice every byte of a
    file that is only a cache.
    """
    return structure.kind == "lock" or (structure.kind, damage) in _HARMLESS


@dataclass
class Found:
    """Findings of verify and check."""

    words: list[str]
    opens: bool = True

    def __bool__(self) -> bool:
        return bool(self.words)

    def names(self, structure: Structure) -> bool:
        """Return whether the findings name the damaged file, or paths below the root."""
        wanted = (structure.file.name.removesuffix(".pack").removesuffix(".sqlite"), _DUPLICATE, "/root/")
        return any(name in words for words in self.words for name in wanted)


def look(copy: Path) -> Found:
    """Run verify and check, which must raise nothing but a CiuicError; return their findings."""
    try:
        with Repository.open(copy) as repository:
            words = [
                f"{damage.kind} {damage.reason} {os.fsdecode(damage.path)} {damage.file} {damage.snapshots}"
                for damage in verify_snapshots(repository, checksum=True).damages
            ]
            report = check(repository, read_data=True)
            words += [f"{finding.kind} {finding.message} {finding.snapshots}" for finding in report.findings]
            return Found([entry for entry in words if "that no snapshot needs" not in entry])
    except Damaged as error:
        return Found([error.message], opens=False)


Came = dict[tuple[SnapshotId, bytes], trees.Facts]


def readable(made: Made, copy: Path, target: Path) -> Came:
    """Restore every snapshot, assert that every file is right, and return those that came back whole."""
    came: Came = {}
    with Repository.open(copy) as repository:
        for id_ in made.snapshots:
            came.update(restored(repository, id_, made.root, target, made.manifests[id_]))
    return came


def restored(
    repository: Repository, id_: SnapshotId, root: Path, target: Path, wanted: trees.Manifest
) -> Came:
    """Restore one snapshot of `root`, compare, and return what came back whole (directories apart)."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        snapshot = repository.snapshots.load(id_)
        plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(target))
        result = execute(plan)
    except (Damaged, NotFound):
        return {}
    top = target / root.name
    failed = {os.path.relpath(failure.path, os.fsencode(top)) for failure in result.failed}
    found = trees.manifest(top) if top.exists() else {}
    came = {}
    for path, facts in found.items():
        if path.startswith(_JOURNAL):
            continue
        assert path in wanted, f"{id_}: {path!r} was never there"
        assert facts.kind == wanted[path].kind, f"{id_}: {path!r} has another type"
        assert facts.digest == wanted[path].digest, f"{id_}: {path!r} has other content"
        if facts.kind == stat.S_IFDIR or path in failed:
            # A directory's times follow its content, and the failed entry was named.
            continue
        expected = wanted[path]._replace(same_inode_as=b"")
        assert facts._replace(same_inode_as=b"") == expected, f"{id_}: {path!r} was restored wrong"
        came[id_, path] = expected
    complete = {path for path, facts in wanted.items() if facts.kind != stat.S_IFDIR} == {p for _, p in came}
    assert complete or not result.complete, f"{id_}: a restore that lacks something says it is complete"
    return came


def judge(made: Made, copy: Path, structure: Structure, damage: str) -> None:
    """Check every promise on a repository of which one structure is damaged. Changes ``copy``."""
    target = copy.parent / "target"
    found = look(copy)
    assert found or harmless(structure, damage), "neither verify nor check found it"
    assert found.names(structure) or harmless(structure, damage), f"it is not named: {found.words}"
    assert found.opens, "the repository cannot be opened, although one structure alone is damaged"
    came = readable(made, copy, target)
    _prune_takes_nothing(made, copy, structure, damage)
    if (structure.kind, damage) == ("marks", "missing"):
        # No mark holds the first snapshot any more, so prune may have removed it.
        came = {}
    after = readable(made, copy, target)
    assert came.keys() <= after.keys(), f"prune lost {came.keys() - after.keys()}"
    with Repository.open(copy) as repository:
        check(repository, repair=True, read_data=True)
    after = readable(made, copy, target)
    assert came.keys() <= after.keys(), f"repair lost {came.keys() - after.keys()}"
    if structure.kind == "payload: data, planes":
        assert all(any(id_ in words for words in found.words) for id_ in made.snapshots), (
            "it is not named for what is the difference from it"
        )
    if structure.kind in ("payload: data", "payload: data, difference") and damage != "truncation":
        assert after == expected_restore(made), "what the live files have was not healed"
    _next_snapshot_is_undamaged(made, copy, target)


def expected_restore(made: Made) -> Came:
    return {
        (id_, path): facts._replace(same_inode_as=b"")
        for id_, manifest in made.manifests.items()
        for path, facts in manifest.items()
        if facts.kind != stat.S_IFDIR
    }


def _prune_takes_nothing(made: Made, copy: Path, structure: Structure, damage: str) -> None:
    """Check that prune removes nothing: the newest snapshot stays and the other is held."""
    files = {path.name for path in (copy / "snapshots").iterdir()}
    try:
        with Repository.open(copy) as repository:
            removed = prune(repository, _KEEP_LAST).removed
    except CollectionRefused:
        removed = []
    if (structure.kind, damage) == ("marks", "missing"):
        # The snapshot is not held any more then, and nothing damaged reports it.
        return
    assert removed == []
    assert {path.name for path in (copy / "snapshots").iterdir()} == files


def _next_snapshot_is_undamaged(made: Made, copy: Path, target: Path) -> None:
    """Check that after a full check a new snapshot relies on nothing damaged."""
    with Repository.open(copy) as repository:
        new = take(repository, made.root)
        damages = verify_snapshots(repository, [new.id], checksum=True).damages
        assert [damage for damage in damages if new.id in damage.snapshots] == []
        manifest = trees.manifest(made.root)
        came = restored(repository, new.id, made.root, target, manifest)
    assert len(came) == sum(facts.kind != stat.S_IFDIR for facts in manifest.values())


@dataclass
class Tally:
    """Count of planted damages and their outcomes."""

    planted: int = 0
    meaningless: int = 0
    """Number of damages that need not be reported."""
    failures: list[str] = field(default_factory=list)


def judge_all(
    made: Made, dice: random.Random, go_on: Callable[[], bool] = lambda: True, *, one_each: bool = False
) -> Tally:
    """Plant each damage of each kind of structure once, in a place chosen by `dice`, and judge it.

    With ``one_each`` only one damage of each kind of structure, chosen by `dice`.
    """
    by_kind: dict[str, list[Structure]] = {}
    for structure in made.structures:
        by_kind.setdefault(structure.kind, []).append(structure)
    tally = Tally()
    copy = made.top / "copy" / "repository"
    for structures in by_kind.values():
        possible = list(damages(structures[0]))
        for damage in [dice.choice(possible)] if one_each else possible:
            if not go_on():
                return tally
            structure = dice.choice(structures)
            shutil.copytree(made.repository, copy)
            if plant(made, copy, structure, damage, dice):
                tally.planted += 1
                tally.meaningless += harmless(structure, damage)
                try:
                    judge(made, copy, structure, damage)
                except Exception as error:
                    tally.failures.append(f"{damage} of {structure}: {type(error).__name__}: {error}")
            shutil.rmtree(copy)
    return tally
