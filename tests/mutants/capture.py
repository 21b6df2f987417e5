"""Faults in captures of a sealed epoch."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/daemon/capture",
    "tests/property/test_capture_exact.py",
    "tests/property/test_capture_inherited.py",
    "tests/property/test_core_cut.py",
    "tests/conformance/test_capture_through_mount.py",
    "tests/e2e/test_tracking_across_stops.py",
)

MUTANTS = (
    Mutant(
        "capture_trusts_incomplete",
        "ciuic/daemon/capture/entries.py",
        "            and not _lacks_something(snapshot, path)\n",
        "",
        "A file that could not be read once is missing in all later snapshots.",
        (
            "tests/unit/daemon/capture/test_capture_reads_and_reports.py",
            "tests/unit/daemon/capture/test_capture_walk.py",
            "tests/property/test_capture_exact.py",
            *TESTS,
        ),
    ),
    Mutant(
        "capture_trusts_other_excludes",
        "ciuic/daemon/capture/entries.py",
        "            and record.excludes_digest == excludes_digest\n",
        "",
        "Files that are not excluded any more stay out of all snapshots.",
        ("tests/unit/daemon/capture/test_capture_walk.py", "tests/property/test_capture_exact.py", *TESTS),
    ),
    Mutant(
        "capture_believes_racy_time",
        "ciuic/daemon/capture/entries.py",
        "            and st.ctime_ns <= self._settled_before_ns\n",
        "",
        "A change within a tick of the last cut is in no snapshot.",
        (
            "tests/unit/daemon/capture/test_files_changing_under_capture.py",
            "tests/unit/daemon/capture/test_capture_walk.py",
            *TESTS,
        ),
    ),
    Mutant(
        "capture_believes_open_file",
        "ciuic/daemon/capture/entries.py",
        "previous.flags & (FLAG_OPEN_FOR_WRITING | FLAG_NOT_HELD)",
        "previous.flags & FLAG_NOT_HELD",
        "What a mapping stored after the last cut is in no snapshot.",
        (
            "tests/unit/daemon/capture/test_files_changing_under_capture.py",
            "tests/unit/daemon/capture/test_capture_walk.py",
            *TESTS,
        ),
    ),
    Mutant(
        "capture_skips_new_hole",
        "ciuic/daemon/capture/content.py",
        ("                    if over_base:\n                        changes.update("),
        ("                    if over_base and piece.data:\n                        changes.update("),
        "A punched hole is restored with its old content.",
        ("tests/property/test_core_cut.py", "tests/property/test_capture_exact.py", *TESTS),
    ),
)
