"""States of a training, stored as they are and recoded as the writer process does it: numbers that change a little from one to the next."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Final

from ciuic.repository import Repository, Walker
from ciuic.repository.compression import Codec, Content
from ciuic.training.rules import Keep
from ciuic.training.writer.codecs import CodecChooser, ReverseDeltas
from ciuic.training.writer.messages import Manifest, ManifestFile, RetentionRules
from ciuic.training.writer_process import LastCommit, commit
from ciuic.types import ChunkId, Entry, RootRecord, SnapshotDraft, SnapshotId

BLOCK: Final = 8192


def drifting(count: int, size_bytes: int, *, drift: float = 1e-4, seed: int = 2) -> Iterator[bytes]:
    """Return successive states of 4-byte numbers."""
    drawn = random.Random(seed)
    values = [drawn.gauss(0, 0.02) for _ in range(size_bytes // 4)]
    for _ in range(count):
        yield struct.pack(f"<{len(values)}f", *values)
        values = [value * (1 + drawn.gauss(0, drift)) for value in values]


def save_state(repository: Repository, state: bytes, number: int) -> SnapshotId:
    """Store a state as it is, in packs of its own."""
    with repository.writer() as writer:
        contents = [Content(state[at : at + BLOCK], codec=Codec("raw")) for at in range(0, len(state), BLOCK)]
        ids = writer.put_chunks(contents)
        ref = writer.update_block_map((b"", 0), len(ids), dict(enumerate(ids)))
        entry = Entry(
            name=b"f", mode=0o100644, size_bytes=len(state), content=ref.content, map_height=ref.map_height
        )
        tree = writer.update_tree(b"", {b"f": entry})
        top = Entry(name=b"", mode=0o40755, content=tree.id)
        id_ = SnapshotId(f"cs-{number:06x}")
        writer.commit(
            SnapshotDraft(id=id_, time_ns=number, host="h", roots=(RootRecord(path=b"/r", entry=top),))
        )
        writer.seal_packs(1)
    return id_


def chunks_of(repository: Repository, id_: SnapshotId) -> list[ChunkId]:
    snapshot = repository.snapshots.load(id_)
    return [reached.id for reached in Walker(repository).walk(snapshot) if reached.kind == "data"]


def content_of(repository: Repository, id_: SnapshotId) -> bytes:
    return b"".join(map(repository.chunks.get, chunks_of(repository, id_)))


def recode(repository: Repository, id_: SnapshotId, after: SnapshotId, *, kind: str = "difference") -> int:
    """Store a state as the difference from another; return how many chunks got another form."""
    bases = dict(zip(chunks_of(repository, id_), chunks_of(repository, after), strict=True))
    wanted = {
        chunk: Codec("best" if kind == "best" else "difference", 4, base)
        for chunk, base in bases.items()
        if base not in (chunk, b"")
    }
    with repository.writer() as writer:
        done = writer.recode(wanted)
        writer.seal_packs(1)
        return done.chunks


STATE_BLOCK: Final = 65536


class Saves:
    """Successive commits of one state and what follows them, as the writer process makes them."""

    def __init__(
        self, repository: Repository, keep: tuple[Keep, ...] = (), *, seal_from_bytes: int = 1
    ) -> None:
        self.repository = repository
        self.seal_from_bytes = seal_from_bytes
        rules = RetentionRules(keep=keep)
        self.chooser = CodecChooser("auto", rules, later=True)
        self.deltas = ReverseDeltas(
            str(repository.path), b"/training", rules, seal_from_bytes=seal_from_bytes
        )
        self.known = LastCommit()

    def save(self, content: bytes) -> SnapshotId:
        file = ManifestFile("model/weight.safetensors", 0, len(content), 4)
        manifest = Manifest(time_ns=1, message="", tags=(), files=[file])
        with self.repository.writer() as writer:
            chosen = self.chooser.begin(writer)
            view = memoryview(content)
            snapshot = commit(self.repository, writer, view, manifest, b"/training", self.known, chosen)
            self.chooser.done(chosen)
            self.deltas.saved(snapshot.id, chosen)
            writer.seal_packs(self.seal_from_bytes)
        self.repository.close()
        return snapshot.id

    def flags(self, id_: SnapshotId) -> set[int]:
        return {self.repository.chunks.locate(chunk).flags for chunk in chunks_of(self.repository, id_)}
