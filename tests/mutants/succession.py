"""Faults in workers that go on where another one was killed."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/fuse_layer/journal",
    "tests/property/test_session_journal.py",
    "tests/property/test_killed_names.py",
    "tests/unit/daemon/roots/test_session_keeper.py",
    "tests/unit/daemon/roots/test_supervised_root.py",
    "tests/property/test_capture_inherited.py",
    "tests/conformance/test_worker_life.py",
    "tests/crash/test_killed_workers.py",
    "tests/e2e/test_job_survives_dead_workers.py",
)

MUTANTS = (
    Mutant(
        "journal_accepts_short_record",
        "ciuic/fuse_layer/journal/journal_writer.py",
        "                if os.write(self._fd, record) != len(record):\n",
        "                if not os.write(self._fd, record):\n",
        "A successor lacks open files after the journal met a full disk, and the job's calls fail.",
        ("tests/property/test_session_journal.py", *TESTS),
    ),
    Mutant(
        "journal_keeps_stale_listing",
        "ciuic/fuse_layer/journal/journal_writer.py",
        "                    names, size_bytes = [], 0\n",
        "                    return\n",
        "A directory that is being listed shows names twice or not at all after a worker's death.",
        ("tests/property/test_session_journal.py", *TESTS),
    ),
    Mutant(
        "removed_file_keeps_names",
        "ciuic/fuse_layer/journal/inherited_session.py",
        ("        node.name, node.aliases = None, set()\n    elif"),
        ("        node.name = None\n    elif"),
        "An open file that was removed is taken for another one by a successor.",
        ("tests/property/test_session_journal.py", *TESTS),
    ),
    Mutant(
        "forgotten_node_comes_back",
        "ciuic/fuse_layer/journal/inherited_session.py",
        "            if self.archive is None or node_id in self.dropped:\n",
        "            if self.archive is None:\n",
        "A reused node number leads to a file that is gone after a worker's death.",
        ("tests/property/test_session_journal.py", *TESTS),
    ),
    Mutant(
        "claim_kept_by_detached_worker",
        "ciuic/fuse_layer/journal/succession.py",
        ("        with suppress(OSError):\n            path.unlink()\n        return cls.inherit(path)"),
        "        return cls.inherit(path)",
        "A root cannot be mounted while a detached worker serves open files.",
        ("tests/unit/fuse_layer/journal", *TESTS),
    ),
    Mutant(
        "release_takes_other_claim",
        "ciuic/fuse_layer/journal/succession.py",
        "            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):\n",
        "            if self._path.exists():\n",
        "Two workers answer the requests of one session.",
        ("tests/unit/fuse_layer/journal", *TESTS),
    ),
    Mutant(
        "out_of_memory_counts_as_fault",
        "ciuic/fuse_layer/journal/succession.py",
        "return row + (status != -signal.SIGKILL)",
        "return row + (status != 0)",
        "A root is given up after eight kills for want of memory.",
        ("tests/unit/fuse_layer/journal", *TESTS),
    ),
    Mutant(
        "session_trusts_lost_tracking",
        "ciuic/fuse_layer/core/epochs.py",
        "        current = ChangeSet(since=0, complete=False)\n",
        "        current = ChangeSet(since=inherited.true_epoch, complete=True)\n",
        "What changed before a worker's death is in no later snapshot.",
        ("tests/unit/fuse_layer/tracking", "tests/property/test_capture_inherited.py", *TESTS),
    ),
)
