"""Faults in exact restores into directories that others use."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/restore",
    "tests/property/test_restore_exact.py",
    "tests/property/test_restore_watched.py",
    "tests/property/test_restore_own_modes.py",
    "tests/security/test_destination_owner.py",
    "tests/crash/test_restore_killed.py",
    "tests/smoke/test_restore_in_place.py",
    "tests/e2e/test_restore_checked_after_use.py",
    "tests/e2e/test_restore_shared_in_place.py",
)

MUTANTS = (
    Mutant(
        "shared_end_believed",
        "ciuic/restore/content.py",
        "        return not rest or os.pread(fd, rest, start + whole) == os.pread(pack, rest, offset + whole)\n",
        "        return True\n",
        "A changed end of an existing file stays, and the restore calls it exact.",
        ("tests/unit/restore/files/test_restores_share_extents.py", *TESTS),
    ),
    Mutant(
        "second_name_elsewhere",
        "ciuic/restore/new_files.py",
        "            if max(now.st_nlink, self.existing.st_nlink) > 1 and (differs or not self.entry.link):\n",
        "            if now.st_nlink > 2 and (differs or not self.entry.link):\n",
        "A restore changes the mode of a file outside of its destination, by its other name.",
        (
            "tests/property/test_restore_exact.py",
            "tests/unit/restore/test_restore_between_directories.py",
            "tests/security/test_destination_owner.py",
            *TESTS,
        ),
    ),
    Mutant(
        "believed_file_given_away",
        "ciuic/restore/new_files.py",
        "            if believed and self.entry.is_file and now.st_uid != self.entry.uid:\n",
        "            if believed and self.entry.is_file and now.st_uid < 0:\n",
        "A user's file with size and time of a lost one is given to that one's owner.",
        (
            "tests/unit/restore/files/test_believed_content.py",
            "tests/security/test_destination_owner.py",
            "tests/property/test_restore_exact.py",
            *TESTS,
        ),
    ),
    Mutant(
        "newcomer_replaced",
        "ciuic/restore/new_files.py",
        ("            rename_new(source, temporary, folder, name)\n        elif"),
        ("            os.rename(temporary, name, src_dir_fd=source, dst_dir_fd=folder)\n        elif"),
        "A file that appears during a restore is overwritten without a question.",
        (
            "tests/property/test_restore_watched.py",
            "tests/unit/restore/test_restore_between_directories.py",
            "tests/security/test_destination_owner.py",
            *TESTS,
        ),
    ),
    Mutant(
        "unchecked_files_forgotten",
        "ciuic/restore/journal.py",
        "        unchecked = unchecked or (resumed and before is not None and before.unchecked)\n",
        "",
        "A restore that goes on never checks what the killed one has put in place unread.",
        ("tests/unit/restore/files/test_check_after_use.py", *TESTS),
    ),
    Mutant(
        "damaged_file_taken_for_changed",
        "ciuic/restore/deferred_check.py",
        ("            return False\n        try:\n            return all("),
        ("            return True\n        try:\n            return all("),
        "A file with damaged content stays under its name.",
        ("tests/unit/restore/files/test_check_after_use.py", *TESTS),
    ),
    Mutant(
        "links_between_roots",
        "ciuic/restore/workers.py",
        "        key = (root, file.entry.link)\n",
        '        key = (b"", file.entry.link)\n',
        "Files of two roots with one inode number become one file.",
        (
            "tests/property/test_restore_exact.py",
            "tests/property/test_restore_selected.py",
            "tests/unit/restore/test_restore_between_directories.py",
            *TESTS,
        ),
    ),
    Mutant(
        "hole_not_compared",
        "ciuic/restore/content.py",
        "            return zeros(fd, at, batch.end, limit)\n",
        "            return True\n",
        "Old content stays where the file has a hole at its end.",
        (
            "tests/property/test_restore_exact.py",
            "tests/unit/restore/files/test_restores_share_extents.py",
            *TESTS,
        ),
    ),
)
