"""Mutation test of syncs: each sync is left out in turn, in a copy of the code, and a test must fail.

The list is made by hand and compared with the code: a sync that no mutation takes away is a failure too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torture.figure import Figure

CHECKOUT = Path(__file__).parents[2]
_SYNC = re.compile(
    r"\bos\.fsync\(|\bos\.fdatasync|\b[dD]isk(\(\))?\.sync(_dir)?\(|\bself\.sync(_dir)?\(|_sync_file\(\)|\bstore\.sync\(\)"
)
# Tests that notice their absence, or the reason why nothing is lost.
_ELSEWHERE = {
    (
        "ciuic/fuse_layer/core/files.py",
        "(os.fdatasync if datasync else os.fsync)(file.fd)",
    ): "the job asked for it: tortures cut, kills, power",
    ("ciuic/fuse_layer/core/overlay_hooks.py", "os.fsync(directory)"): "likewise",
    ("ciuic/system/disk.py", "os.fsync(fd)"): "what the others call",
    ("ciuic/repository/writing/writer.py", "self._store.sync()"): "calls Appender.sync, which is mutated",
    (
        "ciuic/fuse_layer/core/directories.py",
        "(os.fdatasync if datasync else os.fsync)(fd)",
    ): "the job asked for it",
    (
        "ciuic/repository/writing/pack_maintenance.py",
        "store.sync()",
    ): "sealing, which follows, syncs the same once more",
    ("ciuic/repository/writing/chunk_store.py", "self._sync_file()"): "calls what is mutated",
    (
        "ciuic/restore/journal.py",
        "os.fsync(fd)",
    ): "a record that a power cut takes is not told; the restore goes on by its journal, whose sync is mutated",
    ("ciuic/restore/journal.py", "Disk().sync_dir(str(directory))"): "likewise",
    (
        "os.fsync(folder)",
    ): "after a power cut the journal, whose removal comes later, has the check made again, and the file renamed",
    (
        "ciuic/restore/journal.py",
        "os.fsync(self._folder)",
    ): "after a power cut a finished check would be made again",
    ("ciuic/training/save_schedule.py", "os.fsync(fd)"): "measures how fast the disk is, and keeps nothing",
}
_FOLDERS = ("ciuic", "cli", "daemon", "fuse_layer", "tests")
_STORE = "tests/crash/test_repository_power_cut.py"
_GC = "tests/crash/test_prune_killed.py"
_ORDER = "tests/crash/test_sync_order.py"
_LAZY = "tests/unit/lazy/test_lazy_restore_sync_order.py"
_WEB = "tests/unit/cli/commands/test_web_orders.py"
_COPY = "tests/unit/maintenance/test_copy_of_a_busy_repository.py"


class Mutation(NamedTuple):
    """A mutation that disables the ``nth`` line with ``line`` in the file; one of ``tests`` must fail."""

    what: str
    file: str
    line: str
    tests: tuple[str, ...]
    nth: int = 0


MUTATIONS = (
    Mutation("a pack", "ciuic/repository/writing/chunk_store.py", "self._disk.sync(self._fd)", (_STORE, _ORDER)),
    Mutation("packs/ when a pack is new", "ciuic/repository/writing/chunk_store.py", "self._disk.sync_dir(", (_STORE, _ORDER)),
    Mutation("what stands before a footer", "ciuic/repository/writing/chunk_store.py", "self._sync_file()", (_ORDER,), nth=1),
    Mutation("a footer", "ciuic/repository/writing/chunk_store.py", "self._sync_file()", (_ORDER,), nth=2),
    Mutation("a recovered tail", "ciuic/repository/writer_index.py", "disk.sync(fd)", (_ORDER,)),
    Mutation("snapshots/ after a removal", "ciuic/repository/writing/writer.py", "self._disk.sync_dir(", (_STORE, _ORDER)),
    Mutation("a small file before its name", "ciuic/system/disk.py", "self.sync(fd)", (_STORE, _ORDER, _LAZY)),
    Mutation("the name of a small file", "ciuic/system/disk.py", "self.sync_dir(", (_STORE, _ORDER)),
    Mutation("the name of a small file in an open directory", "ciuic/system/disk.py", "self.sync(dir_fd)", (_ORDER, _LAZY)),
    Mutation("packs/ after a deletion", "ciuic/system/disk.py", "self.sync_dir(", (_ORDER,), nth=1),
    Mutation("the time of packs/ before a pack is cut", "ciuic/system/disk.py", "self.sync_dir(", (_GC,), nth=2),
    Mutation("live chunks before their pack goes", "ciuic/repository/writing/pack_maintenance.py", "store.sync()", (_STORE, _ORDER), nth=1),
    Mutation("a pack that is let go of", "ciuic/repository/writing/pack_maintenance.py", "store.sync()", (_ORDER,)),
    Mutation("a new repository's name", "ciuic/repository/repository.py", "disk.sync_dir(os.path", (_ORDER,)),
    Mutation("saved tracking that is used up", "ciuic/fuse_layer/core/overlay_core.py", "os.fsync(state_fd)", (_ORDER,)),
    Mutation("a restored file before its name", "ciuic/restore/new_files.py", "os.fsync(fd)", (_ORDER,), nth=1),
    Mutation("a kept file with new attributes", "ciuic/restore/new_files.py", "os.fsync(fd)", (_ORDER,)),
    Mutation("restored directories", "ciuic/restore/destination_directories.py", "os.fsync(fd)", (_ORDER,)),
    Mutation("the note of an unfinished restore", "ciuic/restore/journal.py", "os.fsync(fd)", (_ORDER,)),
    Mutation("a copied pack", "ciuic/maintenance/copying.py", "disk.sync(write_fd)", (_COPY,)),
    Mutation("the names of copied packs", "ciuic/maintenance/copying.py", 'disk.sync_dir(f"{where}/{PACKS_DIR}")', (_COPY,)),
    Mutation("what is gone from a copy", "ciuic/maintenance/copying.py", "disk.sync_dir(directory)", (_COPY,)),
    Mutation("the name of a copy", "ciuic/maintenance/copying.py", "disk.sync_dir(os.path", (_COPY,)),
    Mutation("the directory of notes of losses and restores", "ciuic/repository/record_files.py", "disk.sync_dir(", (_ORDER,)),
    Mutation("files of an exported folder", "ciuic/training/convert/destination.py", "os.fsync(fd)", (_ORDER,)),
    Mutation("the names in an exported folder", "ciuic/training/convert/destination.py", "os.fsync(made)", (_ORDER,)),
    Mutation("the name of an exported folder", "ciuic/training/convert/destination.py", "os.fsync(parent)", (_ORDER,)),
    Mutation("what an exported folder replaced", "ciuic/training/convert/destination.py", "os.fsync(parent)", (_ORDER,), nth=1),
    Mutation("a file of an artefact", "ciuic/artefacts/folder.py", "os.fsync(fd)", (_ORDER,)),
    Mutation("the names of an artefact", "ciuic/artefacts/folder.py", "os.fsync(folder)", (_ORDER,)),
    Mutation("the name of a new artefact", "ciuic/artefacts/folder.py", "os.fsync(above)", (_ORDER,)),
    Mutation("the name of a checkpoint's directory", "ciuic/training/dcp/metadata.py", "disk.sync_dir(", (_ORDER,)),
    Mutation("an action of the page in its log", "ciuic/cli/commands/web/broker.py", "os.fsync(fd)", (_WEB,)),
    Mutation("the name of that log", "ciuic/cli/commands/web/broker.py", "Disk().sync_dir(", (_WEB,)),
    Mutation("the directory of a remote", "ciuic/remote/objects/directory_objects.py", "self._disk.sync_dir(", (_ORDER,)),
    Mutation("the name of another host's object", "ciuic/remote/objects/directory_objects.py", "self._disk.sync(directory)", (_ORDER,)),
    Mutation("a deleted object", "ciuic/remote/objects/directory_objects.py", "self._disk.sync(directory)", (_ORDER,), nth=1),
    Mutation("an object's name", "ciuic/remote/objects/directory_objects.py", "self._disk.sync(directory)", (_ORDER,), nth=2),
    Mutation("an object's directory", "ciuic/remote/objects/directory_objects.py", "self._disk.sync(fd)", (_ORDER,)),
    Mutation("an object", "ciuic/remote/objects/directory_objects.py", "self._disk.sync(fd)", (_ORDER,), nth=1),
    Mutation("a lazily restored file", "ciuic/lazy/filling.py", "os.fsync(fd)", (_LAZY,)),
    Mutation("names that a lazy restore moved", "ciuic/lazy/service.py", "os.fsync(self.destination)", (_LAZY,)),
    Mutation("times of the directory", "ciuic/lazy/service.py", "os.fsync(self.destination)", (_LAZY,), nth=1),
    Mutation("a journal of changes", "ciuic/lazy/changes.py", "os.fsync(fd)", (_LAZY,)),
    Mutation("its name", "ciuic/lazy/changes.py", "os.fsync(self.directory)", (_LAZY,)),
)  # fmt: skip


def run(seconds: float, seed: int) -> list[Figure]:
    """Try every mutation, however long it takes (two minutes): none depends on chance."""
    missed = without_mutation()
    with tempfile.TemporaryDirectory() as place:
        for folder in _FOLDERS:
            shutil.copytree(CHECKOUT / folder, Path(place, folder), symlinks=True)
        shutil.copy(CHECKOUT / "pyproject.toml", place)
        if _notices(Path(place), sorted({test for mutation in MUTATIONS for test in mutation.tests})):
            return [Figure("syncs whose absence a test notices", 0, ("the tests fail without any mutation",))]
        for mutation in MUTATIONS:
            if not _is_noticed(Path(place), mutation):
                missed.append(f"nobody notices that {mutation.what} is not synced ({mutation.file})")
    return [Figure("syncs whose absence a test notices", len(MUTATIONS), tuple(missed))]


def _is_noticed(place: Path, mutation: Mutation) -> bool:
    file = place / mutation.file
    text = file.read_text()
    lines = text.split("\n")
    at = _places(lines, mutation.line)[mutation.nth]
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + "pass"
    file.write_text("\n".join(lines))
    try:
        return _notices(place, mutation.tests)
    finally:
        file.write_text(text)


def _places(lines: list[str], line: str) -> list[int]:
    return [at for at, text in enumerate(lines) if line in text and not text.lstrip().startswith("def ")]


def _notices(place: Path, tests: tuple[str, ...] | list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}:{place}/tests"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise AssertionError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return done.returncode == 1


def without_mutation() -> list[str]:
    """Return syncs in the code that no mutation takes away and that no other known test covers."""
    mutated = set()
    for mutation in MUTATIONS:
        lines = (CHECKOUT / mutation.file).read_text().split("\n")
        mutated.add((mutation.file, _places(lines, mutation.line)[mutation.nth]))
    missed = []
    for file in sorted((CHECKOUT / "ciuic").rglob("*.py")):
        name = str(file.relative_to(CHECKOUT))
        for at, text in enumerate(file.read_text().split("\n")):
            known = (name, at) in mutated or (name, text.split("#")[0].strip()) in _ELSEWHERE
            if _SYNC.search(text) and not known:
                missed.append(f"no mutation for {name}:{at + 1}: {text.strip()}")
    return missed
