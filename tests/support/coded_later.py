"""States of a training, saved and coded as the writer process does it."""

from __future__ import annotations

from typing import Final

from support.raw_states import chunks_of

from ciuic.repository import Repository
from ciuic.training.policy.retention_rules import Keep
from ciuic.training.writer.codecs import CodecChooser
from ciuic.training.writer.committing import LastCommit, commit
from ciuic.training.writer.messages import Manifest, ManifestFile, RetentionRules
from ciuic.training.writer.reverse_deltas import ReverseDeltas
from ciuic.types import SnapshotId

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
