"""A host that is messier than one plain root, with a model of what must still exist on it.

A `Mess` does one random action after the other: a job changes files, mounts come and go below the root, git repositories are made and
cleaned around it, ciuic protects, stops, is killed, takes snapshots, restores with every option and prunes. After each action the model is
compared: what is mounted is mounted still and has what it had, the job saw no error, and a restore gave exactly what the snapshot had,
outside of what is mounted. All choices come from one seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support import leftovers, trees
from support.live import CommandFailed, Live

from ciuic.system import mountinfo

_LAST_NS = (1 << 63) - 1
_CONFIG = '\n[retention]\nkeep_within = "0"\nkeep_last = 4\nkeep_safety = "0"\n'
_GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "safe.directory=*")


class Broken(AssertionError):
    """A promise was broken; the text says which."""


class Foreign(NamedTuple):
    """Something mounted below the root."""

    place: Path
    kind: str
    wanted: trees.Manifest
    """What it holds; of a bind mount inside the root, which changes with the root, empty."""


class Taken(NamedTuple):
    """A snapshot and what it must give back."""

    id: str
    files: trees.Manifest
    borders: frozenset[bytes]
    """Paths at which something was mounted."""


class Mess:
    """The host. A context manager that leaves nothing mounted and nothing running."""

    def __init__(self, top: Path, seed: int) -> None:
        self.top = top
        self.root = top / "work" / "root"
        self.root.mkdir(parents=True)
        self.dice = random.Random(seed)
        self.live = Live(top, more_config=_CONFIG)
        self.foreign: list[Foreign] = []
        self.taken: list[Taken] = []
        self.flagged: set[Path] = set()
        self.job: subprocess.Popen[bytes] | None = None
        self.history: list[str] = []
        self.restores = 0
        self._number = 0
        for name in ("a", "b", "c", "a/deep"):
            (self.root / name).mkdir()
            (self.root / name / "file").write_bytes(self.dice.randbytes(500))

    def __enter__(self) -> Mess:
        self.live.run("protect", str(self.root))
        self.live.start(self.root)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_job()
        for path in self.flagged:
            subprocess.run(["chattr", "-ia", str(path)], check=False, capture_output=True, timeout=30)
        self.live.close()
        leftovers.unmount_below(self.top)

    # -- one action

    def act(self) -> None:
        """Do one random action and compare the model. Raises Broken."""
        actions: list[tuple[int, Callable[[], None]]] = [
            (30, self._write),
            (8, self._odd),
            (8, self._mount),
            (5, self._unmount),
            (12, self._snapshot),
            (14, self._restore_in_place),
            (8, self._restore_elsewhere),
            (3, self._restore_dry),
            (4, self._stop_and_start),
            (3, self._kill_worker),
            (2, self._kill_daemon),
            (3, self._prune),
            (3, self._git),
            (3, self._begin_job),
            (3, self._end_job),
            (1, self._unprotect),
        ]
        action = self.dice.choices([one for _, one in actions], [weight for weight, _ in actions])[0]
        self.history.append(action.__name__.strip("_"))
        try:
            action()
            self._compare_mounts()
        except (OSError, CommandFailed, TimeoutError, subprocess.SubprocessError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error

    def check_snapshots(self) -> int:
        """Restore every listed snapshot elsewhere and compare it; return how many there were."""
        listed = {row.id for row in self.live.list()}
        for taken in self.taken:
            if taken.id in listed:
                self._compare_elsewhere(taken)
        return len([taken for taken in self.taken if taken.id in listed])

    # -- the job

    def _write(self) -> None:
        dice, folder = self.dice, self._folder()
        files = [path for path in self._entries(folder) if path.is_file() and not path.is_symlink()]
        what = dice.choice(
            ["new", "new", "append", "replace", "rename", "remove", "folder", "link", "symlink", "rmtree"]
        )
        self.history[-1] += f" {what} {folder.relative_to(self.root)}"
        if what == "new" or (what in ("append", "replace", "rename", "remove", "link") and not files):
            self._new_name(folder).write_bytes(dice.randbytes(dice.choice([0, 1, 700, 5000, 300_000])))
        elif what == "append":
            inside = [
                path for one in self.foreign if one.kind == "inside" for path in self._files_behind(one.place)
            ]
            with open(dice.choice([*files, *inside]), "ab") as file:
                file.write(dice.randbytes(dice.choice([1, 5000])))
        elif what == "replace":
            made = self._new_name(folder)
            made.write_bytes(dice.randbytes(3000))
            made.rename(dice.choice(files))
        elif what == "rename":
            dice.choice(files).rename(self._new_name(folder))
        elif what == "remove":
            dice.choice(files).unlink()
        elif what == "folder":
            self._new_name(folder).mkdir(dice.choice([0o700, 0o755, 0o555]))
        elif what == "link":
            os.link(dice.choice(files), self._new_name(folder))
        elif what == "symlink":
            os.symlink("../" * dice.randrange(4) + "a/file", self._new_name(folder))
        elif what == "rmtree":
            folders = [
                path
                for path in self._entries(folder)
                if path.is_dir() and not path.is_symlink() and not self._holds_anything(path)
            ]
            if folders:
                shutil.rmtree(dice.choice(folders))

    def _odd(self) -> None:
        """Make something that hosts have and pictures of hosts lack."""
        dice, folder = self.dice, self._folder()
        what = dice.choice(["time", "sparse", "name", "append-only", "fifo", "attribute", "hidden"])
        path = self._new_name(folder)
        self.history[-1] += f" {what} {path.relative_to(self.root)}"
        if what == "time":
            path.write_bytes(b"odd")
            seconds = dice.choice([-2_000_000_000, -1, 0, 10_413_792_000, 4_000_000_000])
            os.utime(path, ns=(seconds * 10**9 + 1, seconds * 10**9 + 7))
        elif what == "sparse":
            with open(path, "wb") as file:
                file.truncate(dice.choice([1 << 20, 1 << 33]) if dice.random() < 0.2 else 5 << 20)
                file.seek(1 << 20)
                file.write(b"x")
        elif what == "name":
            odd = dice.choice([b"n" * 255, b"\xff\xfe", b"new\nline", "über".encode(), b"-rf", b"*"])
            with suppress(FileExistsError):
                os.mkdir(os.path.join(os.fsencode(folder), odd))
        elif what == "append-only" and not os.path.ismount(self.root):
            # chattr(1) does not reach the file system through the overlay.
            path.write_bytes(b"first\n")
            subprocess.run(["chattr", "+a", str(path)], check=True, timeout=30, capture_output=True)
            self.flagged.add(path)
            with open(path, "ab") as file:
                file.write(b"second\n")
            subprocess.run(["chattr", "-a", str(path)], check=True, timeout=30, capture_output=True)
            self.flagged.discard(path)
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "attribute":
            path.write_bytes(b"x")
            os.setxattr(path, "user.kind", dice.randbytes(dice.choice([0, 20, 900])))
        elif what == "hidden":
            (folder / f".{path.name}").write_bytes(b"x")

    def _begin_job(self) -> None:
        """Stand in a directory with an open file, as a shell and a logger do."""
        if self.job is None:
            self.job = subprocess.Popen(
                ["bash", "-c", "exec 9>>job-log; while read -r word; do pwd -P >/dev/null && echo $word >&9 && echo done || echo failed; done"],
                cwd=self.root / "a" if (self.root / "a").is_dir() else self.root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            self._ask_job()

    def _ask_job(self) -> None:
        if self.job is not None:
            assert self.job.stdin is not None
            assert self.job.stdout is not None
            self.job.stdin.write(b"go\n")
            self.job.stdin.flush()
            if self.job.stdout.readline() != b"done\n":
                raise Broken("a program with its working directory and a file in the root met an error")

    def _end_job(self) -> None:
        if self.job is not None:
            self.job.communicate(timeout=60)
            self.job = None

    # -- what is mounted

    def _mount(self) -> None:
        dice = self.dice
        if len(self.foreign) >= 4:
            return
        kind = dice.choice(["tmpfs", "bind", "inside", "file", "loop"])
        # Names of mounts come last in a listing: a bind mount of the root's own files is never the first name of an inode.
        place = (self._folder() if kind == "tmpfs" else self.root) / f"~{self._next()}"
        source = self.top / f"source{self._number}"
        self.history[-1] += f" {kind} {place.relative_to(self.root)}"
        if kind == "file":
            place.touch()
            source.write_bytes(dice.randbytes(100))
        else:
            place.mkdir()
        if kind == "bind":
            source.mkdir()
        if kind == "inside":
            source = self._folder()
            if source == self.root:
                # No FUSE file system shows its top in itself (EIO).
                place.rmdir()
                return
        if kind == "tmpfs":
            words = ["-t", "tmpfs", "-o", "size=4m", "none"]
        elif kind == "loop":
            with open(source, "wb") as file:
                file.truncate(8 << 20)
            subprocess.run(
                ["mkfs.ext4", "-q", "-I", "128", "-O", "^has_journal", str(source)],
                check=True,
                timeout=60,
                capture_output=True,
            )
            words = ["-o", "loop", str(source)]
        else:
            words = ["--bind", str(source)]
        subprocess.run(["mount", *words, str(place)], check=True, timeout=30)
        if kind in ("tmpfs", "bind", "loop"):
            (place / "deep").mkdir()
            (place / "deep" / "precious").write_bytes(dice.randbytes(200))
            place.chmod(0o751)
            os.utime(place, ns=(10**18, 10**18))
        self.foreign.append(Foreign(place, kind, self._facts_of(place, kind)))

    def _unmount(self) -> None:
        # Never what something else is mounted in.
        free = [
            one
            for one in self.foreign
            if not any(other is not one and one.place in other.place.parents for other in self.foreign)
        ]
        if not free:
            return
        one = self.dice.choice(free)
        self.history[-1] += f" {one.place.relative_to(self.root)}"
        if not self._is_on_top(one.place):
            # Mounted before the root was served, so the overlay hides the mount from umount(8).
            return
        end = time.monotonic() + 20
        while (
            done := subprocess.run(["umount", str(one.place)], check=False, timeout=30, capture_output=True)
        ).returncode:
            # A capture or a worker may look into it at this moment, as any other program could.
            if time.monotonic() > end:
                users = subprocess.run(
                    ["fuser", "-vm", str(one.place)], check=False, timeout=30, capture_output=True
                )
                raise Broken(
                    f"{one.place} ({one.kind}) cannot be unmounted: {done.stderr.decode()} {users.stderr.decode()}"
                )
            time.sleep(0.05)
        self.foreign.remove(one)

    def _is_on_top(self, place: Path) -> bool:
        """Return whether umount(8) finds a mount at a place: one below the overlay is served by it, and hidden."""
        mounts = {mount.mount_id: mount for mount in mountinfo.read()}
        overlays = {one.mount_id for one in mounts.values() if one.mount_point == os.fsencode(self.root)}
        (found,) = [one for one in mounts.values() if one.mount_point == os.fsencode(place)]
        if not overlays:
            return True
        while found.parent_id in mounts:
            if found.parent_id in overlays:
                return True
            found = mounts[found.parent_id]
        return False

    def _facts_of(self, place: Path, kind: str) -> trees.Manifest:
        if kind == "inside":
            return {}
        if kind == "file":
            return {b".": place.read_bytes()}  # type: ignore[dict-item]
        return trees.manifest(place)

    def _compare_mounts(self) -> None:
        points = {mount.mount_point for mount in mountinfo.read()}
        for one in self.foreign:
            if os.fsencode(one.place) not in points:
                raise Broken(f"{one.place} ({one.kind}) is not mounted any more")
            found = self._facts_of(one.place, one.kind)
            if found != one.wanted:
                raise Broken(
                    f"what is mounted at {one.place} ({one.kind}) has changed: {trees.differences(one.wanted, found)}"
                )
        self._ask_job()

    # -- snapshots

    def _snapshot(self) -> None:
        self._ensure_running()
        files = self._files()
        borders = frozenset(self._borders())
        taken = Taken(self.live.snapshot(), files, borders)
        row = self.live.json("show", taken.id)
        if row.get("left_out") or "partial" in row.get("tags", []):
            raise Broken(f"{taken.id} lacks a root: {row}")
        self.taken.append(taken)

    def _prune(self) -> None:
        self.live.run("prune")
        if self.taken and self.taken[-1].id not in {row.id for row in self.live.list()}:
            raise Broken(f"prune removed the newest snapshot, {self.taken[-1].id}")

    def _choose(self) -> Taken | None:
        listed = {row.id for row in self.live.list()}
        known = [taken for taken in self.taken if taken.id in listed]
        return self.dice.choice(known) if known else None

    def _restore_in_place(self) -> None:
        taken = self._choose()
        if taken is None:
            return
        dice = self.dice
        delete = dice.random() < 0.7
        mode = dice.choice(["", "=always", "=if-changed", "=if-newer", "=never"])
        paths = [b"."] + [path for path, facts in taken.files.items() if path != b"." and dice.random() < 0.2]
        path = dice.choice([b".", b".", dice.choice(paths), *sorted(taken.borders)[:1]])
        target = os.fsencode(self.root) if path == b"." else os.fsencode(self.root) + b"/" + path
        self.history[-1] += f" {taken.id} {path!r} delete={delete} overwrite{mode}"
        words: list[str | bytes] = [
            "-s",
            taken.id,
            "-p",
            target,
            f"--overwrite{mode}",
            *(["--delete"] if delete else []),
        ]
        done = self.live.run("restore", *words, expect=None)
        if done.returncode not in (0, 1, 3, 8):
            raise Broken(f"restore ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
        self.restores += 1
        if mode in ("", "=always") and done.returncode == 0:
            self._compare_in_place(taken, path, delete=delete)

    def _compare_in_place(self, taken: Taken, path: bytes, *, delete: bool) -> None:
        found = _below(self._files(), path)
        wanted = _below(taken.files, path)
        borders = {*taken.borders, *self._borders()}
        for border in borders:
            for side in (found, wanted):
                for name in [name for name in side if name == border or name.startswith(border + b"/")]:
                    del side[name]
        if not delete:
            found = {name: facts for name, facts in found.items() if name in wanted}
        lines = trees.differences(_comparable(wanted, delete=delete), _comparable(found, delete=delete))
        if lines:
            raise Broken(f"{taken.id} was not restored in place exactly: {lines}")

    def _restore_elsewhere(self) -> None:
        taken = self._choose()
        if taken is not None:
            self.history[-1] += f" {taken.id}"
            self._compare_elsewhere(taken)

    def _compare_elsewhere(self, taken: Taken) -> None:
        dest = self.top / f"dest{self._next()}"
        done = self.live.run("restore", "-s", taken.id, "-p", str(self.root), "-d", str(dest), expect=None)
        if done.returncode == 3 and taken.id not in {row.id for row in self.live.list()}:
            # The daemon applied the retention policy meanwhile.
            return
        if done.returncode:
            raise Broken(f"restore ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
        self.restores += 1
        found = trees.manifest(dest / self.root.name)
        for border in taken.borders:
            found.pop(border, None)
        lines = trees.differences(_comparable(taken.files), _comparable(found))
        shutil.rmtree(dest)
        if lines:
            raise Broken(f"{taken.id} was not restored exactly: {lines}")

    def _restore_dry(self) -> None:
        taken = self._choose()
        if taken is not None:
            before = self._files()
            self.live.run(
                "restore",
                "-s",
                taken.id,
                "-p",
                str(self.root),
                "--overwrite",
                "--delete",
                "--dry-run",
                expect=None,
            )
            if self._files() != before:
                raise Broken("a dry run has changed the root")

    # -- ciuic's life

    def _ensure_running(self) -> None:
        if self.live.daemon is None:
            self.live.start(self.root)

    def _stop_and_start(self) -> None:
        if self.live.daemon is None:
            self.live.start(self.root)
            return
        self.live.run("stop", expect=None)
        self.live.daemon.wait(60)
        self.live.daemon = None
        self._compare_mounts()
        if self.dice.random() < 0.5:
            self.live.start(self.root)

    def _kill_worker(self) -> None:
        status = self.live.status()
        if status is None:
            return
        pid = status["roots"][0].get("worker_pid")
        if pid:
            os.kill(pid, signal.SIGKILL)
            # Whoever calls meanwhile waits for the successor.
            os.stat(self.root / "a" if (self.root / "a").exists() else self.root)
            self.live.wait_mounted(self.root)

    def _kill_daemon(self) -> None:
        if self.live.daemon is not None:
            self.live.daemon.kill()
            self.live.daemon.wait()
            self.live.daemon = None
            self._compare_mounts()
            self.live.start(self.root)

    def _unprotect(self) -> None:
        self._end_job()
        self._ensure_running()
        self.live.run("unprotect", str(self.root))
        self._compare_mounts()
        self.live.run("protect", str(self.root))
        self.live.wait_mounted(self.root)

    def _git(self) -> None:
        """A work tree around the root, as people have it, and the commands that clean one."""
        around = self.root.parent
        what = self.dice.choice(["init", "status", "clean", "stash"])
        self.history[-1] += f" {what}"
        if not (around / ".git").exists():
            subprocess.run([*_GIT, "init", "-q", "."], cwd=around, check=True, timeout=60)
            (around / ".gitignore").write_text("root/\n")
            subprocess.run([*_GIT, "add", ".gitignore"], cwd=around, check=True, timeout=60)
            subprocess.run([*_GIT, "commit", "-qm", "x"], cwd=around, check=True, timeout=60)
        if what == "status":
            shown = subprocess.run(
                [*_GIT, "status", "--porcelain"], cwd=around, check=True, timeout=60, capture_output=True
            ).stdout
            if shown:
                raise Broken(f"git status shows something of ciuic's: {shown!r}")
        elif what == "clean":
            # A file that is open and removed has its only name in the state directory, which this removes: the worker has it, and
            # no successor of the worker.
            if self.job is not None and not (self.root / "a" / "job-log").exists():
                self._end_job()
            # The root is excluded: what git may remove of it is not ciuic's matter.
            subprocess.run([*_GIT, "clean", "-fdxq", "-e", "root"], cwd=around, check=True, timeout=60)
        elif what == "stash":
            subprocess.run([*_GIT, "stash", "-uq"], cwd=around, check=False, timeout=60, capture_output=True)

    # -- the model

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _new_name(self, folder: Path) -> Path:
        return folder / f"f{self._next()}"

    def _borders(self) -> list[bytes]:
        return [os.fsencode(one.place.relative_to(self.root)) for one in self.foreign]

    def _is_foreign(self, path: Path) -> bool:
        return any(path == one.place or one.place in path.parents for one in self.foreign)

    def _holds_anything(self, path: Path) -> bool:
        """Return whether something is mounted at or below a path, or the job stands there."""
        busy = [one.place for one in self.foreign]
        if self.job is not None:
            busy += [self.root / "a", self.root / "a" / "job-log"]
        return any(place == path or path in place.parents for place in busy)

    def _entries(self, folder: Path) -> list[Path]:
        return [
            path
            for path in sorted(folder.iterdir())
            if not self._is_foreign(path) and path.name not in ("job-log", ".ciuic-state")
        ]

    def _files_behind(self, place: Path) -> list[Path]:
        """Return files of the root by the names that a bind mount inside it gives them."""
        return [
            path
            for path in sorted(place.iterdir())
            if path.is_file() and not path.is_symlink() and path.name != "job-log"
        ]

    def _folder(self) -> Path:
        """Return a random directory of the root, on its own file system and not shown elsewhere in it."""
        here = self.root
        while self.dice.random() < 0.6:
            below = [
                path
                for path in self._entries(here)
                if path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "~"))
            ]
            if not below:
                break
            here = self.dice.choice(below)
        return here

    def _files(self) -> trees.Manifest:
        """Return what the root holds, without what is mounted in it."""
        found = trees.manifest(self.root)
        # The mark of a restore that is not complete.
        found.pop(b".ciuic-restore", None)
        for border in self._borders():
            for name in [name for name in found if name == border or name.startswith(border + b"/")]:
                del found[name]
        return found


def _below(files: trees.Manifest, path: bytes) -> trees.Manifest:
    if path == b".":
        return dict(files)
    return {name: facts for name, facts in files.items() if name == path or name.startswith(path + b"/")}


def _comparable(files: trees.Manifest, *, delete: bool = True) -> trees.Manifest:
    """Return the facts that a restore gives back: times as far as a snapshot holds them, names of links in any order."""
    known = set(files)
    groups: dict[bytes, bytes] = {}
    found: trees.Manifest = {}
    for name in sorted(files):
        facts = files[name]
        first = groups.setdefault(facts.same_inode_as, name)
        mtime_ns = min(facts.mtime_ns, _LAST_NS)
        if stat.S_ISDIR(facts.kind) and not delete:
            mtime_ns = 0
        found[name] = facts._replace(same_inode_as=first if known else name, mtime_ns=mtime_ns)
    return found


def run_rounds(top: Path, seed: int, rounds: int, *, until: float | None = None) -> tuple[int, int, int]:
    """Do that many actions, or as many as fit; return the numbers of actions, restores and snapshots checked. Raises Broken."""
    with Mess(top, seed) as mess:
        done = 0
        try:
            while done < rounds and (until is None or time.monotonic() < until):
                mess.act()
                done += 1
            mess._ensure_running()
            checked = mess.check_snapshots()
        except Broken as error:
            raise Broken(f"seed {seed}, action {done} after {mess.history[-6:]}: {error}") from error
        return done, mess.restores, checked
