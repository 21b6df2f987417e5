"""Faults in uploads of snapshots to a remote."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/remote/reading/test_collection_keeps_real_snapshots.py",
    "tests/unit/remote/upload",
    "tests/unit/remote/log",
    "tests/unit/remote/index",
    "tests/unit/remote/reading/test_uploads_read_back_exactly.py",
    "tests/property/test_remote_protocol.py",
    "tests/property/test_remote_interrupted.py",
    "tests/e2e/test_cli_remote.py",
)

MUTANTS = (
    Mutant(
        "uploader_remembers_collected",
        "ciuic/remote/uploader.py",
        ("        self._whole = set()\n        self._walked = set()\n\n\nclass _Nodes:"),
        ("        self._walked = set()\n\n\nclass _Nodes:"),
        "A snapshot is committed on the remote without chunks that a collection took.",
        ("tests/unit/remote/reading/test_collection_keeps_real_snapshots.py", *TESTS),
    ),
    Mutant(
        "failed_pack_forgotten",
        "ciuic/remote/uploader.py",
        "                self._failure = self._failure or failure\n",
        "                self._failure = self._failure or (failure if self._waiting_packs else None)\n",
        "A snapshot is committed though the store has refused its last pack.",
        (
            "tests/unit/remote/upload/test_outbox.py",
            "tests/unit/remote/upload/test_replication_of_a_repository.py",
            "tests/unit/remote/upload/test_upload_order.py",
            *TESTS,
        ),
    ),
    Mutant(
        "damaged_copy_sent",
        "ciuic/remote/uploader.py",
        ("            if chunks.id_of(content) == id_:\n                return _StoredBytes("),
        ("            if content:\n                return _StoredBytes("),
        "A chunk that has decayed here takes its name on the remote, for all hosts.",
        (
            "tests/unit/remote/upload/test_replication_of_a_repository.py",
            "tests/unit/remote/reading/test_uploads_read_back_exactly.py",
            *TESTS,
        ),
    ),
    Mutant(
        "base_in_condemned_pack",
        "ciuic/remote/remote_index.py",
        (
            "            bases = self._stored({base for some in differences.values() for base in some}, bases_left - 1)\n"
            "            found.update(chunk for chunk, of in differences.items() if not bases.isdisjoint(of))\n"
        ),
        "            found.update(differences)\n",
        "A snapshot relies on a chunk whose base a collection takes.",
        ("tests/unit/remote/index", *TESTS),
    ),
    Mutant(
        "two_hosts_with_one_log",
        "ciuic/remote/writer_log.py",
        (
            "            if isinstance(entry, LogHello):\n"
            "                if said_hello:\n"
            "                    return True\n"
            "                said_hello = True\n"
        ),
        "",
        "Two hosts with one cloned disk write to one log.",
        (
            "tests/unit/remote/upload/test_uploader_log_over_years.py",
            "tests/property/test_remote_protocol.py",
            *TESTS,
        ),
    ),
    Mutant(
        "commit_again_after_lost_reply",
        "ciuic/remote/writer_log.py",
        "            if isinstance(entry, LogCommit) and all(\n",
        "            if not entry.nonce and isinstance(entry, LogCommit) and all(\n",
        "A commit whose reply was lost is made twice.",
        ("tests/unit/remote/log/test_one_commit_for_each_call.py", *TESTS),
    ),
)
