"""Export to a Git working tree: one commit for a snapshot, large files as objects of Git LFS.

The commit is made by `git fast-import` and names the snapshot in a trailer (``Ciuic-Snapshot``). Its tree has the manifest, by which the next export
knows what did not change. What is in the working tree besides stays.

Guarantees: on return objects, commit, files and index are durable. The branch moves last: an export that was interrupted leaves it as it was, and is
repeated by the same command. Nothing that the repository configures runs (`git`).

Names that git or git-lfs would obey (``.gitattributes``, ``.lfsconfig``, ``.git``) are left out: content must not change when it is checked out, nor
be sent elsewhere.

References:
    https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md (pointers, names of objects)
    gitattributes(5), git-update-index(1) (index-info)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.artefacts.folder import MANIFEST, ExportFolder, Manifest, Updated, Written, require_own_directory
from ciuic.artefacts.git import Git, is_obeyed, require_programs
from ciuic.artefacts.snapshot_files import ExportedFile, LeftOut, SnapshotFiles
from ciuic.errors import DestinationExists, UsageError
from ciuic.printable import one_line
from ciuic.types import Snapshot

LFS_BYTES: Final = 1 << 20
"""Size from which a file is an object of Git LFS. Above it git, which keeps every version of a file and clones all of them, is slow."""
_ATTRIBUTES: Final = b".gitattributes"
_BEGIN: Final = b"# ciuic export: begin\n"
_END: Final = b"# ciuic export: end\n"
# Git ignores longer lines (gitattributes(5), since 2.39.1: 2048 bytes).
_MAX_LINE_BYTES: Final = 2000
_LFS_ATTRIBUTES: Final = b" filter=lfs diff=lfs merge=lfs -text\n"
_PENDING: Final = "refs/ciuic/export"
"""Commit of an export until everything else is done."""
_PENDING_LOCK: Final = f".git/{_PENDING}.lock".encode("ascii")
_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
# What begins so git-lfs takes for a pointer, wherever it stands, and misses its object.
_POINTER_HEAD: Final = b"version http"
_MAX_POINTER_BYTES: Final = 1024
_TEMPORARY: Final = b".git/ciuic-export.tmp"
_DEFAULT_BRANCH: Final = "main"


class Committed(NamedTuple):
    """Result of an export."""

    commit: str
    """Id of the commit that has the snapshot."""
    branch: str
    is_new: bool
    """False if the branch had this snapshot already."""
    updated: Updated
    lfs_files: int
    left_out: tuple[LeftOut, ...]
    complaint: str
    """Why git-lfs could not be set up in a working tree that was there before; empty if it is."""


def export_git_lfs(
    snapshot: Snapshot,
    repository_id: str,
    path: bytes,
    found: SnapshotFiles,
    destination: Path,
    *,
    overwrite: bool = False,
) -> Committed:
    """Commit files of a snapshot to a Git working tree, durably on return.

    Args:
        snapshot: The snapshot.
        repository_id: Id of its repository.
        path: Path in the snapshot that is exported.
        found: What it has there.
        destination: A Git working tree, an empty directory, or the name of a new one in a directory that exists.
        overwrite: Whether to replace files of the working tree that no export has written.

    Raises:
        NotFound: git or git-lfs is not installed.
        NotPermitted: the working tree is another user's, or, for root, another user may write to it.
        DestinationExists: the directory has other things in it, or one of the files that no export has written.
        Damaged: a file cannot be read; the branch is as it was.
        CiuicError: git refused something.
    """
    require_programs()
    with ExportFolder(destination, _TEMPORARY) as folder:
        return _Export(snapshot, repository_id, path, found, folder).run(overwrite=overwrite)


class _Export:
    """One export to a working tree that is locked."""

    def __init__(
        self, snapshot: Snapshot, repository_id: str, path: bytes, found: SnapshotFiles, folder: ExportFolder
    ) -> None:
        self._snapshot = snapshot
        self._repository_id = repository_id
        self._path = path
        self._folder = folder
        self._git = Git(folder.path.absolute())
        refused = [LeftOut(name, "git would obey it") for name in found.files if is_obeyed(name)]
        own = [
            LeftOut(name, "the export has a file of this name") for name in (MANIFEST,) if name in found.files
        ]
        self._left_out = tuple(sorted((*found.left_out, *refused, *own)))
        skipped = {one.name for one in self._left_out}
        self._files = {name: file for name, file in found.files.items() if name not in skipped}
        self._written: dict[bytes, Written] = {}
        self._read_bytes = 0

    def run(self, *, overwrite: bool) -> Committed:
        complaint = self._open_repository()
        self._hash_name = self._git("rev-parse", "--show-object-format").decode("ascii").strip()
        branch = self._branch()
        head = self._id_of("HEAD^{commit}")
        before = self._manifest_of(head)
        # An export that was interrupted has written files of its own.
        known = {*before.files, *self._manifest_of(self._id_of(_PENDING)).files}
        self._folder.refuse_foreign(
            (*self._files, MANIFEST), (*known, *((MANIFEST,) if known else ())), overwrite=overwrite
        )
        self._folder.begin()
        # Left by a git that was killed: this name is locked by exports alone, and no other one runs.
        if self._folder.status(_PENDING_LOCK) is not None:
            self._folder.remove(_PENDING_LOCK)
        tree = self._tree_of(head)
        commit, manifest, attributes = self._commit(head, before, tree)
        gone = sorted(known - self._files.keys())
        for name in gone:
            self._folder.remove(name)
        self._check_out(manifest, attributes)
        self._stage(commit, gone)
        self._sync()
        order = f"update {branch} {commit} {head or '0' * len(commit)}\n" if commit != head else ""
        if self._id_of(_PENDING):
            order += f"delete {_PENDING}\n"
        if order:
            self._git(
                "update-ref", "--stdin", "-m", f"ciuic export {self._snapshot.id}", given=os.fsencode(order)
            )
            self._sync()
        lfs = [one for one in self._written.values() if one.digest.startswith("lfs:")]
        size_bytes = sum(one.size_bytes for one in self._written.values())
        updated = Updated(len(self._files), size_bytes, self._read_bytes, len(gone))
        short = branch.removeprefix("refs/heads/")
        return Committed(commit, short, commit != head, updated, len(lfs), self._left_out, complaint)

    def _open_repository(self) -> str:
        """Make the repository if there is none; return what hinders git-lfs in it."""
        git_directory = self._folder.path / ".git"
        status = self._folder.status(b".git")
        if status is None:
            if os.listdir(self._folder.fd):
                raise DestinationExists(
                    f"{self._folder.path} is neither empty nor a Git working tree",
                    hint="name another directory",
                )
        elif not git_directory.is_dir() or git_directory.is_symlink():
            raise UsageError(
                f"{git_directory} must be a directory: linked working trees and submodules are not exported to",
                hint="name a clone, or a new directory",
            )
        else:
            for name in ("", "config", "objects", "refs", "HEAD", "lfs", "index"):
                if os.path.lexists(git_directory / name):
                    require_own_directory(git_directory / name)
                if (git_directory / name).is_symlink():
                    raise UsageError(
                        f"{git_directory / name} must not be a symbolic link",
                        hint="name a clone, or a new directory",
                    )
        if self._folder.status(b".git/HEAD") is None:
            # Without the host's templates, which have hooks.
            self._git("init", "--quiet", "--template=", f"--initial-branch={_DEFAULT_BRANCH}")
        return "" if self._git.has_lfs() else self._git.install_lfs()

    def _branch(self) -> str:
        found = self._git.ask("symbolic-ref", "--quiet", "HEAD")
        if found is None:
            raise UsageError(f"{self._folder.path} has no branch checked out", hint="git switch BRANCH")
        return os.fsdecode(found.rstrip(b"\n"))

    def _id_of(self, name: str) -> str:
        return (self._git.ask("rev-parse", "--quiet", "--verify", name) or b"").decode("ascii").strip()

    def _manifest_of(self, commit: str) -> Manifest:
        data = self._git.ask("cat-file", "blob", f"{commit}:{os.fsdecode(MANIFEST)}") if commit else None
        return Manifest.decode(data or b"")

    def _tree_of(self, commit: str) -> dict[bytes, tuple[str, str]]:
        """Return mode and id of each file of a commit."""
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", commit) if commit else b""
        found = {}
        for line in filter(None, listed.split(b"\0")):
            facts, _, name = line.partition(b"\t")
            mode, _, id_ = facts.decode("ascii").split(" ")
            found[name] = mode, id_
        return found

    def _commit(
        self, head: str, before: Manifest, tree: Mapping[bytes, tuple[str, str]]
    ) -> tuple[str, bytes, bytes]:
        """Store objects and the commit under `_PENDING`; return its id, and the content of manifest and attributes."""
        objects = {one.identity: one.digest for one in before.files.values() if one.digest.startswith("lfs:")}
        with self._git.import_stream() as stream:
            stream.write(self._beginning(head))
            changed = False
            for name in before.files.keys() - self._files.keys() & tree.keys():
                stream.delete(name)
                changed = True
            for name, file in self._files.items():
                identity = file.identity
                old = before.files.get(name)
                mode = "120000" if file.entry.is_symlink else "100755" if file.is_executable else "100644"
                if (
                    old is not None
                    and old.identity == identity
                    and tree.get(name) == (mode, self._blob_of(old))
                    and self._has_object(old)
                ):
                    self._written[name] = old
                    continue
                changed = True
                if self._is_lfs(name, file):
                    digest = objects.get(identity, "")
                    written = Written(identity, digest, file.size_bytes)
                    if not digest or not self._has_object(written):
                        written = Written(identity, self._store(file), file.size_bytes)
                    objects[identity] = written.digest
                    pointer = _pointer(written)
                    stream.file(name, mode, (pointer,), len(pointer))
                else:
                    hashed = hashlib.new(self._hash_name, b"blob %d\0" % file.size_bytes)
                    stream.file(name, mode, self._read(file, hashed), file.size_bytes)
                    written = Written(identity, f"git:{hashed.hexdigest()}", file.size_bytes)
                self._written[name] = written
            manifest = self._manifest().encode()
            attributes = self._attributes()
            for name, data in ((MANIFEST, manifest), (_ATTRIBUTES, attributes)):
                changed = changed or tree.get(name) != ("100644", self._blob(data))
                stream.file(name, "100644", (data,), len(data))
            if changed:
                stream.finish()
        return (self._id_of(_PENDING) if changed else head), manifest, attributes

    def _beginning(self, head: str) -> bytes:
        when = max(0, self._snapshot.time_ns // 1_000_000_000)
        who = b"ciuic <ciuic@%s> %d +0000" % (
            re.sub(rb"[^A-Za-z0-9.-]", b"-", os.fsencode(self._snapshot.host)) or b"localhost",
            when,
        )
        lines = [f"Snapshot {self._snapshot.id} of {one_line(self._path)}", ""]
        if self._snapshot.message:
            lines += [one_line(self._snapshot.message), ""]
        lines += [f"Ciuic-Snapshot: {self._snapshot.id}"]
        lines += [f"Ciuic-Tag: {one_line(tag)}" for tag in self._snapshot.tags]
        lines += [f"Ciuic-Path: {one_line(self._path)}", f"Ciuic-Repository: {self._repository_id}"]
        message = "\n".join(lines).encode("utf-8", "backslashreplace") + b"\n"
        begun = b"commit %s\nauthor %s\ncommitter %s\ndata %d\n%s\n" % (
            _PENDING.encode("ascii"), who, who, len(message), message,
        )  # fmt: skip
        # Without a line `from` the commit would go on from an export that was interrupted.
        return (
            begun + b"from %s\n" % head.encode("ascii")
            if head
            else b"reset %s\n%s" % (_PENDING.encode("ascii"), begun)
        )

    def _manifest(self) -> Manifest:
        time = f"{self._snapshot.time_ns // 1_000_000_000}"
        return Manifest(str(self._snapshot.id), self._repository_id, self._path, time, self._written)

    def _attributes(self) -> bytes:
        """Return `.gitattributes`: lines of this export, then the user's, which win."""
        old = self._folder.read(_ATTRIBUTES) or b""
        if old.startswith(_BEGIN):
            old = old.partition(_END)[2]
        lines = [
            _pattern(name) + _LFS_ATTRIBUTES
            for name, one in self._written.items()
            if one.digest.startswith("lfs:")
        ]
        # No conversion of line ends: the bytes are those of the snapshot.
        return b"".join((_BEGIN, b"* -text\n", *lines, _END, old))

    def _is_lfs(self, name: bytes, file: ExportedFile) -> bool:
        if file.entry.is_symlink or len(_pattern(name)) + len(_LFS_ATTRIBUTES) > _MAX_LINE_BYTES:
            return False
        if file.size_bytes < _MAX_POINTER_BYTES:
            return file.source.read(0, len(_POINTER_HEAD)) == _POINTER_HEAD
        return file.size_bytes >= LFS_BYTES

    def _store(self, file: ExportedFile) -> str:
        """Store an object of Git LFS; return its digest."""
        hashed = hashlib.sha256()
        self._folder.write(lambda: _object_name(hashed.hexdigest()), self._read(file, hashed))
        return f"lfs:{hashed.hexdigest()}"

    def _read(self, file: ExportedFile, hashed: hashlib._Hash) -> Iterator[bytes]:
        for piece in file.pieces():
            hashed.update(piece)
            self._read_bytes += len(piece)
            yield piece

    def _has_object(self, written: Written) -> bool:
        kind, _, digest = written.digest.partition(":")
        if kind != "lfs":
            return True
        status = self._folder.status(_object_name(digest))
        return status is not None and status.st_size == written.size_bytes

    def _blob_of(self, written: Written) -> str:
        """Return the id of the blob that stands for a file."""
        kind, _, digest = written.digest.partition(":")
        return self._blob(_pointer(written)) if kind == "lfs" else digest

    def _blob(self, data: bytes) -> str:
        return hashlib.new(self._hash_name, b"blob %d\0%s" % (len(data), data)).hexdigest()

    def _check_out(self, manifest: bytes, attributes: bytes) -> None:
        for name, file in self._files.items():
            entry = file.entry
            if entry.is_symlink:
                if not self._folder.has_link(name, entry.target):
                    self._folder.link(name, entry.target)
            elif not self._folder.has(
                name, entry.size_bytes, entry.mtime_ns, is_executable=file.is_executable
            ):
                kind, _, digest = self._written[name].digest.partition(":")
                pieces = self._folder.copy(_object_name(digest)) if kind == "lfs" else file.pieces()
                self._folder.write(name, pieces, is_executable=file.is_executable, mtime_ns=entry.mtime_ns)
        for name, data in ((MANIFEST, manifest), (_ATTRIBUTES, attributes)):
            if self._folder.read(name) != data:
                self._folder.write(name, (data,))

    def _stage(self, commit: str, gone: list[bytes]) -> None:
        """Bring the names of the export up to date in the index; others stay as they are staged."""
        tree = self._tree_of(commit)
        staged: dict[bytes, tuple[str, str] | None] = {}
        for line in filter(None, self._git("ls-files", "--stage", "-z").split(b"\0")):
            facts, _, name = line.partition(b"\t")
            mode, id_, stage = facts.decode("ascii").split(" ")
            staged[name] = (mode, id_) if stage == "0" else None
        wanted = {name: tree[name] for name in (*self._files, MANIFEST, _ATTRIBUTES)}
        nothing = "0" * len(commit)
        lines = [b"0 %s\t%s\0" % (nothing.encode("ascii"), name) for name in gone if name in staged]
        for name, (mode, id_) in wanted.items():
            if name not in staged or staged[name] != (mode, id_):
                lines.append(f"{mode} {id_}\t".encode("ascii") + name + b"\0")
        if lines:
            self._git("update-index", "--add", "--replace", "-z", "--index-info", given=b"".join(lines))

    def _sync(self) -> None:
        self._folder.sync()
        # Git syncs its files, and no directory of theirs.
        if _libc.syncfs(self._folder.fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(self._folder.path))


_libc = ctypes.CDLL(None, use_errno=True)


def _pointer(written: Written) -> bytes:
    return _POINTER % (written.digest.partition(":")[2].encode("ascii"), written.size_bytes)


def _object_name(digest: str) -> bytes:
    return f".git/lfs/objects/{digest[:2]}/{digest[2:4]}/{digest}".encode("ascii")


def _pattern(name: bytes) -> bytes:
    """Return the pattern of gitattributes(5) that means this very name: from the top, no character of it a wildcard."""
    escaped = b"/" + re.sub(rb"[*?\[\]\\]", rb"\\\g<0>", name)
    if not re.search(rb"[^!#-\[\]-~]|\\", escaped) and b'"' not in escaped:
        return escaped
    quoted = re.sub(rb'["\\]', rb"\\\g<0>", escaped)
    return b'"%s"' % re.sub(rb"[^ -~]", lambda found: b"\\%03o" % found[0][0], quoted)
