"""Faults in prune, check and copies of a repository."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/maintenance",
    "tests/property/test_prune_frees_what_nothing_needs.py",
    "tests/unit/repository/test_damage_in_a_repository.py",
    "tests/unit/repository/codecs",
    "tests/property/test_safety_retention.py",
    "tests/property/test_recode.py",
    "tests/property/test_unstored.py",
    "tests/crash/test_sync_order.py",
    "tests/crash/test_prune_killed.py",
    "tests/crash/test_repository_power_cut.py",
    "tests/crash/test_repository_readers.py",
    "tests/unit/daemon/upkeep",
    "tests/unit/training/writer/test_snapshot_of_several_ranks.py",
)

MUTANTS = (
    Mutant(
        "prune_beside_ranks",
        "ciuic/maintenance/prune.py",
        "        if is_claimed(str(self.repository.path)):\n",
        "        if is_claimed(str(self.repository.path)) and not report.plan.kept:\n",
        "A prune removes chunks of a snapshot that several processes are storing.",
        (
            "tests/unit/training/writer/test_snapshot_of_several_ranks.py",
            "tests/property/test_prune_frees_what_nothing_needs.py",
            "tests/unit/maintenance/test_copy_of_a_busy_repository.py",
            *TESTS,
        ),
    ),
    Mutant(
        "pack_goes_before_its_rows",
        "ciuic/repository/writing/pack_maintenance.py",
        (
            "    store.index.drop(number, records)\n"
            "    store.packs.forget(number)\n"
            "    disk.remove_file(store.packs.path(number))\n"
            "    return size_bytes\n"
        ),
        (
            "    store.packs.forget(number)\n"
            "    disk.remove_file(store.packs.path(number))\n"
            "    store.index.drop(number, records)\n"
            "    return size_bytes\n"
        ),
        "After a kill a capture takes removed content for stored.",
        ("tests/crash/test_prune_killed.py", "tests/crash/test_sync_order.py", *TESTS),
    ),
    Mutant(
        "copy_elsewhere_unread",
        "ciuic/repository/writing/pack_maintenance.py",
        (
            "                read_copy(store.packs, _plain(location), chunk, store.identity, store.get)\n"
            "                return True\n"
        ),
        "                return True\n",
        "A prune removes the good copy of a chunk whose other copy has decayed.",
        (
            "tests/unit/maintenance/test_check_and_repair.py",
            "tests/property/test_prune_frees_what_nothing_needs.py",
            *TESTS,
        ),
    ),
    Mutant(
        "bases_of_bases_unneeded",
        "ciuic/maintenance/sweep.py",
        "    for _ in range(MAX_READ_BASE_DEPTH):\n",
        "    for _ in range(1):\n",
        "A prune removes chunks from which others are stored as differences.",
        (
            "tests/property/test_prune_frees_what_nothing_needs.py",
            "tests/property/test_recode.py",
            "tests/unit/repository/codecs",
            *TESTS,
        ),
    ),
    Mutant(
        "sweep_beside_unlisted_pack",
        "ciuic/maintenance/sweep.py",
        "    if found.damaged and not salvaged and writer.repository.may_have_bases:\n",
        "    if found.damaged and not salvaged and not writer.repository.may_have_bases:\n",
        "A prune removes bases of chunks in a pack that cannot be listed.",
        (
            "tests/unit/repository/codecs",
            "tests/property/test_prune_frees_what_nothing_needs.py",
            "tests/unit/maintenance",
            *TESTS,
        ),
    ),
    Mutant(
        "held_yields_to_space",
        "ciuic/maintenance/prune.py",
        '        or (reason == "held" and decision.id not in held_for_users)\n',
        "",
        "A snapshot that an administrator holds is removed where the disk is full.",
        ("tests/property/test_prune_frees_what_nothing_needs.py", "tests/property/test_unstored.py", *TESTS),
    ),
    Mutant(
        "marks_of_broken_walk_stay",
        "ciuic/maintenance/prune.py",
        ("            self.marks = LiveChunks(self.repository)\n            # A dry run"),
        "            # A dry run",
        "A prune beside another one removes chunks of a snapshot that stays.",
        ("tests/property/test_prune_frees_what_nothing_needs.py", *TESTS),
    ),
    Mutant(
        "copy_without_its_hold",
        "ciuic/maintenance/copying.py",
        (
            "            if name in content.marks:\n"
            '                _replace(disk, f"{where}/{MARKS_DIR}/{name}", content.marks[name])\n'
            '            _replace(disk, f"{where}/{SNAPSHOTS_DIR}/{name}", data)\n'
        ),
        (
            '            _replace(disk, f"{where}/{SNAPSHOTS_DIR}/{name}", data)\n'
            "            if name in content.marks:\n"
            '                _replace(disk, f"{where}/{MARKS_DIR}/{name}", content.marks[name])\n'
        ),
        "A copy that is cut short has held snapshots without their holds.",
        ("tests/unit/maintenance/test_copy_of_a_busy_repository.py", *TESTS),
    ),
    Mutant(
        "copy_goes_by_size",
        "ciuic/maintenance/copying.py",
        "    return (state.st_size, state.st_mtime_ns) == pack\n",
        "    return state.st_size == pack.size_bytes\n",
        "A copy keeps a pack whose end was written anew, and its snapshots cannot be read.",
        ("tests/unit/maintenance/test_copy_of_a_busy_repository.py", *TESTS),
    ),
    Mutant(
        "repair_beside_ranks",
        "ciuic/maintenance/check.py",
        ("        if is_claimed(str(self.repository.path)):\n            return\n        for number"),
        "        for number",
        "A repair removes chunks of a snapshot that several processes are storing.",
        (
            "tests/unit/maintenance/test_check_and_repair.py",
            "tests/unit/training/writer/test_snapshot_of_several_ranks.py",
            *TESTS,
        ),
    ),
    Mutant(
        "repair_beside_unreadable_snapshot",
        "ciuic/maintenance/check.py",
        "        complete = not unreadable\n",
        "        complete = True\n",
        "A repair removes what only a snapshot needs whose file can be brought back.",
        ("tests/unit/maintenance/test_check_and_repair.py", *TESTS),
    ),
)
