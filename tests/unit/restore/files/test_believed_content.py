"""Files that a restore takes for right by their size and time."""

from __future__ import annotations

import os
from pathlib import Path

from support.restoring import take

from ciuic.repository import Repository
from ciuic.restore import Overwrite, execute, plan_restore


def test_a_believed_file_of_another_owner_is_replaced(tmp_path: Path) -> None:
    """Whoever gives a file of their own the size and time of a lost one does not have it given to that one's owner."""
    root, out = tmp_path / "root", tmp_path / "out"
    root.mkdir()
    (root / "file").write_bytes(b"right")
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, root)
        for _ in range(2):
            plan = plan_restore(
                repository, snapshot, [os.fsencode(root)], os.fsencode(out), overwrite=Overwrite.IF_CHANGED
            )
            assert execute(plan).complete
            restored = out / "root/file"
            assert (restored.read_bytes(), restored.stat().st_uid) == (b"right", os.geteuid())
            time_ns = restored.stat().st_mtime_ns
            restored.write_bytes(b"wrong")
            os.utime(restored, ns=(time_ns, time_ns))
            os.chown(restored, 4321, -1)
