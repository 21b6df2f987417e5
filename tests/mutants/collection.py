"""Faults in collections of what no snapshot on a remote needs."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/remote/collection",
    "tests/unit/remote/reading/test_collection_keeps_real_snapshots.py",
    "tests/unit/remote/upkeep/test_collection_by_an_operator.py",
    "tests/unit/remote/tiers",
    "tests/property/test_remote_protocol.py",
    "tests/e2e/test_cli_remote_upkeep.py",
)

MUTANTS = (
    Mutant(
        "collects_what_is_moved",
        "ciuic/remote/upkeep/collection_round.py",
        "        refs = {*(self._index.ref(number) for number in doomed), *given_up} - self._reader.moving()\n",
        "        refs = {*(self._index.ref(number) for number in doomed), *given_up}\n",
        "A pack that is being moved to another class is deleted with its move.",
        ("tests/unit/remote/tiers/test_moves_to_colder_classes.py", *TESTS),
    ),
    Mutant(
        "collects_committed_manifest",
        "ciuic/remote/upkeep/collection_round.py",
        (
            "            manifests=tuple(name for name in content.manifests if name not in snapshots),\n"
            "        )\n"
        ),
        ("            manifests=content.manifests,\n        )\n"),
        "A snapshot that was committed while a collection ran loses its manifest.",
        ("tests/unit/remote/collection", "tests/property/test_remote_protocol.py", *TESTS),
    ),
    Mutant(
        "kept_copy_unread",
        "ciuic/remote/upkeep/collection_round.py",
        "        doomed = self._kept.keep_sound(live, _keep_needed(self._index, live, numbers))\n",
        "        doomed = _keep_needed(self._index, live, numbers)\n",
        "The good copy of a chunk is deleted though the other one has decayed.",
        ("tests/unit/remote/collection/test_kept_copies.py", *TESTS),
    ),
    Mutant(
        "packs_before_manifests",
        "ciuic/remote/upkeep/collection_round.py",
        (
            "    objects.delete(content.manifests)\n"
            "    objects.delete([pack_name(ref) for ref in content.condemned])\n"
        ),
        (
            "    objects.delete([pack_name(ref) for ref in content.condemned])\n"
            "    objects.delete(content.manifests)\n"
        ),
        "A reader finds manifests whose chunks are gone.",
        ("tests/unit/remote/collection", "tests/property/test_remote_protocol.py", *TESTS),
    ),
    Mutant(
        "bases_uncollected",
        "ciuic/remote/upkeep/collection_round.py",
        ("            add_bases(self._index, live)\n            return live\n"),
        "            return live\n",
        "Chunks from which others are stored as differences are deleted.",
        (
            "tests/unit/remote/collection",
            "tests/unit/remote/reading/test_uploads_read_back_exactly.py",
            *TESTS,
        ),
    ),
    Mutant(
        "lost_log_ignored",
        "ciuic/remote/upkeep/collection_round.py",
        ("        self._require_logs()\n        # After the logs"),
        "        # After the logs",
        "A listing that lacks a log costs all snapshots that it commits.",
        ("tests/unit/remote/collection/test_incomplete_listings.py", "tests/unit/remote/log", *TESTS),
    ),
)
