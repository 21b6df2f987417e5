"""Faults in commits, marks and chunks of a repository."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/repository",
    "tests/crash/test_sync_order.py",
    "tests/crash/test_repository_power_cut.py",
    "tests/property/test_hostile_repository.py",
    "tests/property/test_damage_matrix.py",
    "tests/property/test_retention.py",
    "tests/property/test_long_life.py",
)

MUTANTS = (
    Mutant(
        "old_marks_of_new_snapshot",
        "ciuic/repository/writing/writer.py",
        "        self._remove_quietly(self._snapshots.marks_path(draft.id))\n",
        "",
        "A new snapshot has the hold and tags of one that a crash left.",
        (
            "tests/unit/repository/test_repository_as_its_users_call_it.py",
            "tests/unit/repository/test_damage_in_a_repository.py",
            *TESTS,
        ),
    ),
    Mutant(
        "hold_stays_a_users",
        "ciuic/repository/writing/writer.py",
        "    kept_uid: int | msgspec.UnsetType = old.hold_uid if hold is None else msgspec.UNSET\n",
        "    kept_uid: int | msgspec.UnsetType = old.hold_uid\n",
        "A snapshot that root holds yields to free space as a user's does.",
        (
            "tests/unit/repository/test_repository_as_its_users_call_it.py",
            "tests/property/test_prune_frees_what_nothing_needs.py",
            *TESTS,
        ),
    ),
    Mutant(
        "unreadable_marks_release",
        "ciuic/repository/writing/writer.py",
        "        return StoredMarks(id=id_, held=True)\n",
        "        return StoredMarks(id=id_)\n",
        "A decayed marks file and a new tag release a held snapshot.",
        ("tests/unit/repository/test_damage_in_a_repository.py", *TESTS),
    ),
    Mutant(
        "lost_marks_stay_lost",
        "ciuic/repository/writing/writer.py",
        "        self._restore_marks({name for name in names - signatures.keys() if known.get(name)})\n",
        "",
        "A lost marks file releases a held snapshot.",
        ("tests/unit/repository/test_damage_in_a_repository.py", *TESTS),
    ),
    Mutant(
        "difference_from_damaged_base",
        "ciuic/repository/writing/chunk_store.py",
        "        return content if content is not None and self._identity.chunk_id(content) == base else None\n",
        "        return content\n",
        "A chunk that is stored as a difference from a damaged one can never be read.",
        ("tests/unit/repository/codecs", "tests/unit/repository/test_damage_in_a_repository.py", *TESTS),
    ),
    Mutant(
        "writes_go_on_after_failure",
        "ciuic/repository/writing/chunk_store.py",
        ("        if self._failed:\n            raise _SkippedError\n"),
        "",
        "A segment lies behind a hole that a failed write has left in its pack.",
        ("tests/unit/repository/disk/test_write_behind.py", *TESTS),
    ),
    Mutant(
        "recovery_cuts_unknown_pack",
        "ciuic/repository/writing/recovery.py",
        "may_cut=known > 0 or fresh",
        "may_cut=True",
        "A damaged record costs what lies behind it in its pack once the index is lost.",
        (
            "tests/unit/repository/test_damage_in_a_repository.py",
            "tests/crash/test_repository_power_cut.py",
            *TESTS,
        ),
    ),
    Mutant(
        "same_instant_before_parent",
        "ciuic/repository/writing/writer.py",
        "return floor_ns + 1 if time_ns <= floor_ns else 0",
        "return floor_ns + 1 if time_ns < floor_ns else 0",
        "The latest of two snapshots of one instant is the older one.",
        (
            "tests/property/test_retention.py",
            "tests/unit/repository/test_repository_as_its_users_call_it.py",
            *TESTS,
        ),
    ),
)
