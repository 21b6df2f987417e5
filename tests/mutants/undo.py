"""Faults in old state that sealed epochs need, and the changes of an epoch."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/fuse_layer/tracking",
    "tests/unit/fuse_layer/core",
    "tests/property/test_undo_log.py",
    "tests/property/test_core_cut.py",
    "tests/property/test_capture_inherited.py",
    "tests/property/test_capture_exact.py",
    "tests/conformance/test_exact_cut.py",
    "tests/e2e/test_job_survives_dead_workers.py",
)

MUTANTS = (
    Mutant(
        "undo_record_before_copy",
        "ciuic/fuse_layer/tracking/undo_log.py",
        (
            "                self._copy_blocks(fd, ino, first, count)\n"
            "                self._append(BlocksRecord(ino, self.true_epoch, first, count))\n"
        ),
        (
            "                self._append(BlocksRecord(ino, self.true_epoch, first, count))\n"
            "                self._copy_blocks(fd, ino, first, count)\n"
        ),
        "A capture that reads between the two stores zeros in place of old blocks.",
        (
            "tests/unit/fuse_layer/tracking/test_saving_of_old_blocks.py",
            "tests/property/test_undo_log.py",
            "tests/unit/fuse_layer/tracking",
            "tests/unit/fuse_layer/core/test_job_succeeds_when_saving_fails.py",
            *TESTS,
        ),
    ),
    Mutant(
        "undo_keeps_saved_table",
        "ciuic/fuse_layer/tracking/undo_log.py",
        ("        self.true_epoch = epoch\n        self._forget_saved()\n"),
        "        self.true_epoch = epoch\n",
        "What changes again after a second cut is stored with its later content.",
        ("tests/property/test_undo_log.py", "tests/property/test_core_cut.py", *TESTS),
    ),
    Mutant(
        "undo_goes_on_behind_torn_record",
        "ciuic/fuse_layer/tracking/undo_log.py",
        "        os.ftruncate(log.fd, log_bytes)\n",
        "",
        "After a worker's death within a write all later records of the log are lost.",
        ("tests/unit/fuse_layer/tracking", *TESTS),
    ),
    Mutant(
        "undo_inherits_older_saves",
        "ciuic/fuse_layer/tracking/undo_log.py",
        ("    if record.epoch != found.true_epoch:\n        return\n"),
        "",
        "A successor does not save for the newer of two epochs what was saved for the older.",
        ("tests/unit/fuse_layer/tracking", "tests/property/test_capture_inherited.py", *TESTS),
    ),
    Mutant(
        "undo_accepts_short_write",
        "ciuic/fuse_layer/tracking/undo_log.py",
        "        if written != len(data):\n",
        "        if not written:\n",
        "On a full disk a capture reads a torn log, and the snapshot has later content.",
        (
            "tests/unit/fuse_layer/tracking/test_saving_of_old_blocks.py",
            "tests/property/test_undo_log.py",
            "tests/unit/fuse_layer/core/test_job_succeeds_when_saving_fails.py",
            *TESTS,
        ),
    ),
    Mutant(
        "undo_fills_disk",
        "ciuic/fuse_layer/tracking/undo_log.py",
        "        if self._copied_bytes > self._free_bytes():\n",
        "        if not self._free_bytes():\n",
        "The undo log fills the job's disk.",
        (
            "tests/unit/fuse_layer/tracking/test_saving_of_old_blocks.py",
            "tests/property/test_undo_log.py",
            "tests/unit/fuse_layer/core/test_job_succeeds_when_saving_fails.py",
            *TESTS,
        ),
    ),
    Mutant(
        "undo_inherits_lost_directory",
        "ciuic/fuse_layer/tracking/undo_log.py",
        "isinstance(record, NameRecord) and record.fd >= 0 and record.epoch >= oldest",
        "isinstance(record, NameRecord) and record.fd >= 0 and record.epoch > oldest",
        "A directory that was moved before its worker died is missing in the snapshot.",
        ("tests/unit/fuse_layer/tracking", "tests/property/test_capture_inherited.py", *TESTS),
    ),
    Mutant(
        "fold_forgets_whole",
        "ciuic/fuse_layer/tracking/changes.py",
        "    now.whole |= before.whole\n",
        "",
        "After a failed capture the next snapshot has old blocks of a rewritten file.",
        ("tests/property/test_core_cut.py", *TESTS),
    ),
    Mutant(
        "shift_saves_range_only",
        "ciuic/fuse_layer/core/overlay_hooks.py",
        "max(size - offset, 0) if mode & _SHIFTS_BLOCKS else length",
        "length",
        "A collapsed range leaves later content behind it in the snapshot.",
        ("tests/property/test_core_cut.py", *TESTS),
    ),
)
