"""Faults in cuts of all roots at one instant, and what follows where one is lost."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/daemon/snapshots",
    "tests/unit/fuse_layer/cut",
    "tests/property/test_core_cut.py",
    "tests/conformance/test_exact_cut.py",
    "tests/e2e/test_cut_torture.py",
    "tests/e2e/test_sets_of_hosts.py",
)

MUTANTS = (
    Mutant(
        "recut_keeps_set",
        "ciuic/daemon/snapshots/pending.py",
        "        record.set_member = None\n",
        "        pass\n",
        "A set of hosts counts as whole though one snapshot in it is of a later instant.",
        ("tests/unit/daemon/snapshots/test_held_snapshots.py", *TESTS),
    ),
    Mutant(
        "cut_outlasts_hold",
        "ciuic/daemon/snapshots/cut.py",
        "if self._clock() - began > USE_OF_HOLD_SECONDS:",
        "if self._clock() - began > 10 * USE_OF_HOLD_SECONDS:",
        "Roots of one snapshot show different instants after a slow cut.",
        ("tests/unit/daemon/snapshots/test_cut_of_all_roots_or_none.py", *TESTS),
    ),
    Mutant(
        "cut_not_aborted",
        "ciuic/daemon/snapshots/cut.py",
        "            _quietly(partial(client.abort, part.epoch))\n",
        "            _quietly(partial(client.committed, part.epoch))\n",
        "Changes of an epoch whose cut failed are in no later snapshot.",
        ("tests/unit/daemon/snapshots/test_cut_of_all_roots_or_none.py", *TESTS),
    ),
    Mutant(
        "cut_of_successor",
        "ciuic/daemon/snapshots/cut.py",
        ("    if session != worker.session:\n        raise CutFailed("),
        ("    if not session:\n        raise CutFailed("),
        "A cut by a worker's successor is taken for an old epoch, and its snapshot is never made.",
        (
            "tests/unit/daemon/snapshots/test_cut_of_all_roots_or_none.py",
            "tests/unit/daemon/snapshots/test_snapshot_from_cut_to_commit.py",
            *TESTS,
        ),
    ),
    Mutant(
        "retake_moves_promise",
        "ciuic/daemon/snapshots/pending.py",
        "record.promised_ns = record.promised_ns or record.time_ns",
        "record.promised_ns = record.time_ns",
        "A snapshot that was cut anew twice tells a wrong promised instant.",
        ("tests/unit/daemon/snapshots/test_snapshot_from_cut_to_commit.py", *TESTS),
    ),
    Mutant(
        "left_out_committed",
        "ciuic/daemon/snapshots/cut.py",
        "captured = {cut.path for cut in pending.remaining} if committed else set()",
        "captured = {cut.path for cut in pending.record.cuts} if committed else set()",
        "Changes of a root that was left out are in no later snapshot.",
        ("tests/unit/daemon/snapshots/test_snapshot_from_cut_to_commit.py", *TESTS),
    ),
    Mutant(
        "gap_forgotten_early",
        "ciuic/daemon/snapshots/cut.py",
        "            if path in roots and roots[path].bypass.all_accounted:\n",
        "            if path in roots:\n",
        "Writes past the overlay after a cut are missed by the next snapshot.",
        ("tests/unit/daemon/snapshots/test_snapshot_from_cut_to_commit.py", *TESTS),
    ),
)
