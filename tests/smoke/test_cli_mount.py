"""``ciuic mount``: what other programs see in a view of snapshots, who may, and how it ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from support import trees
from support.remote_host import RemoteHost, new_remote
from support.restoring import take, write
from support.trees import STEPS, play
from support.until import until

from ciuic.errors import NotPermitted
from ciuic.fuse_layer.system import mounts
from ciuic.remote.objects.opening import open_objects
from ciuic.repository import Repository
from ciuic.view.mount import FS_TYPE
from ciuic.view.tree import snapshot_name

pytestmark = pytest.mark.mount
_OTHER_USER = 4321


# Perl is where there is dpkg; the interpreter of the tests may be root's alone. 0x5412 is TIOCSTI.
_TYPES = r"""exec perl -e 'ioctl(STDIN, 0x5412, $_) for split(//, "id\n"); print "has typed\n"' """


class Place:
    """A root, its repository, and a view that a process of its own serves."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = top / "root"
        self.root.mkdir()
        self.view = top / "view"
        self.messages = top / "messages"
        self.repository = Repository.create(top / "repository", block_size=4096)
        self.served: subprocess.Popen[bytes] | None = None

    def snapshot(self) -> bytes:
        """Take a snapshot of the root; return the name of its directory in a view of all."""
        made = take(self.repository, self.root)
        return snapshot_name(made.time_ns, made.id)

    def command(self, *words: str | Path, repo: str = "") -> list[str]:
        """Return a command line."""
        repo = repo or str(self.top / "repository")
        # The snapshots are of a host with another name.
        trust = ["--trust-repository"] if words[0] in ("shell", "bisect") else []
        return [sys.executable, "-m", "ciuic", "--repo", repo, *trust, *map(str, words)]

    def mount(self, *words: str | Path, repo: str = "") -> None:
        """Mount a view, and return when it answers."""
        self.serve(self.command("mount", self.view, *words, repo=repo))

    def serve(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run a command that mounts a view, and return when it answers."""
        with self.messages.open("wb") as messages:
            self.served = subprocess.Popen(command, stderr=messages, env=environment)
        until("the mount", lambda: self.is_mounted or self._has_ended())

    def _has_ended(self) -> bool:
        assert self.served is not None
        assert self.served.poll() is None, self.messages.read_text()
        return False

    @property
    def is_mounted(self) -> bool:
        """True if a view of ours is mounted."""
        entry = mounts.mount_at(str(self.view))
        return entry is not None and entry.fs_type == FS_TYPE

    def path(self, snapshot: bytes | str = b"latest") -> bytes:
        """Return the path of the root in a view of all snapshots."""
        return os.fsencode(self.view) + b"/" + os.fsencode(snapshot) + os.fsencode(self.root)

    def end(self) -> int:
        """End the view as `kill` does; return the exit status of the command."""
        assert self.served is not None
        self.served.send_signal(signal.SIGTERM)
        return self.served.wait(30)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    if made.served is not None and made.served.poll() is None:
        made.served.kill()
        made.served.wait(30)
    if made.is_mounted:
        mounts.detach(str(made.view), FS_TYPE)
    made.repository.close()


def test_everything_is_as_it_was(place: Place) -> None:
    """Every kind of file with owners, modes, times, attributes, ACLs, links and holes, in each of two snapshots."""
    trees.make_everything(place.root)
    before = trees.manifest(place.root)
    first = place.snapshot()
    (place.root / "block").unlink()
    write(place.root / "folder" / "newer", b"newer")
    after = trees.manifest(place.root)
    second = place.snapshot()
    place.mount()
    assert os.listdir(place.view) == [os.fsdecode(first), os.fsdecode(second), "latest"]
    trees.assert_same(before, trees.manifest(place.path(first)))
    trees.assert_same(after, trees.manifest(place.path()))
    assert os.stat(place.path() + b"/sparse").st_blocks < os.stat(place.path() + b"/sparse").st_size // 512
    with open(place.root / "sparse", "rb") as was, open(place.path() + b"/sparse", "rb") as shown:
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            places = [0]
            while places[-1] < (place.root / "sparse").stat().st_size:
                try:
                    places.append(os.lseek(shown.fileno(), places[-1], whence))
                except OSError:
                    # A hole at the end.
                    break
                whence = os.SEEK_HOLE if whence == os.SEEK_DATA else os.SEEK_DATA
            for start, end in itertools.pairwise(places):
                assert os.pread(was.fileno(), end - start, start) == os.pread(
                    shown.fileno(), end - start, start
                )
    assert place.end() == 0
    assert not place.is_mounted


@pytest.mark.full
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_new_snapshots_appear_as_they_were(place: Place, steps: list) -> None:
    """A view that stays mounted shows each snapshot of a random history, and older ones unchanged."""
    play(place.root, steps)
    expected = trees.manifest(place.root)
    name = place.snapshot()
    if place.served is None:
        place.mount()
    until("the new snapshot", lambda: os.fsdecode(name) in os.listdir(place.view))
    trees.assert_same(expected, trees.manifest(place.path(name)))
    until("the new link", lambda: os.readlink(place.view / "latest") == os.fsdecode(name))
    oldest = sorted(os.listdir(place.view))[0]
    for folder, _, files in os.walk(place.path(oldest)):
        for file in files:
            path = os.path.join(folder, file)
            if os.path.isfile(path) and not os.path.islink(path):
                assert Path(os.fsdecode(path)).stat().st_size == len(Path(os.fsdecode(path)).read_bytes())


@pytest.mark.full
def test_one_snapshot_lies_at_the_top(place: Place) -> None:
    """With an id the roots are at once below the mount, and names that are not there are remembered as such."""
    write(place.root / "a", b"then")
    made = take(place.repository, place.root)
    write(place.root / "a", b"now")
    place.snapshot()
    place.mount(str(made.id))
    assert (place.view / place.root.relative_to("/") / "a").read_bytes() == b"then"
    for name in ("missing", "a/below"):
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            os.stat(place.view / place.root.relative_to("/") / name)


@pytest.mark.full
def test_nothing_can_be_changed(place: Place) -> None:
    """Every change is refused as on a read-only file system, also to root."""
    write(place.root / "a", b"a")
    place.snapshot()
    place.mount()
    shown = Path(os.fsdecode(place.path()))
    for change in (
        lambda: (shown / "b").write_bytes(b""),
        lambda: (shown / "a").write_bytes(b""),
        lambda: (shown / "a").unlink(),
        lambda: (shown / "a").rename(shown / "b"),
        lambda: (shown / "d").mkdir(),
        lambda: (shown / "a").chmod(0),
        lambda: os.utime(shown / "a"),
        lambda: os.truncate(shown / "a", 0),
        lambda: os.setxattr(shown / "a", "user.x", b"1"),
        lambda: os.rmdir(place.view / "latest"),
        lambda: (place.view / "new").mkdir(),
    ):
        with pytest.raises(OSError, match=r"Read-only|Not a directory") as refused:
            change()
        assert refused.value.errno in (errno.EROFS, errno.ENOTDIR)


@pytest.mark.full
def test_another_user_reads_what_he_could_read_then(place: Place) -> None:
    """Owners, modes and ACLs of the snapshot hold, although the files are open to all now; and without the option nothing is shown."""
    for name, mode in (("open", 0o644), ("closed", 0o600), ("closed-to-all-but-him", 0o600)):
        write(place.root / name, b"x")
        (place.root / name).chmod(mode)
    subprocess.run(["setfacl", "-m", f"u:{_OTHER_USER}:r", place.root / "closed-to-all-but-him"], check=True)
    write(place.root / "private" / "inside", b"x")
    (place.root / "private").chmod(0o700)
    for folder in (place.root, *place.root.parents):
        if folder.is_relative_to(place.top.parents[2]):
            folder.chmod(0o755)
    name = place.snapshot()
    for path in place.root.rglob("*"):
        path.chmod(0o777)

    def readable(path: bytes) -> bool:
        done = subprocess.run(
            ["timeout", "30", "setpriv", f"--reuid={_OTHER_USER}", "--clear-groups", "cat", path],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode == 0

    place.mount("--allow-other")
    shown = place.path(name)
    assert [
        entry
        for entry in (b"open", b"closed", b"closed-to-all-but-him", b"private/inside")
        if readable(shown + b"/" + entry)
    ] == [b"open", b"closed-to-all-but-him"]
    # A directory above the root that is closed to others now hides the root, as it does in the host.
    assert place.end() == 0
    place.top.chmod(0o711)
    place.root.parent.chmod(0o700)
    place.view = place.top.parent / "elsewhere"
    place.mount("--allow-other")
    assert not readable(place.path(name) + b"/open")
    assert place.end() == 0
    place.root.parent.chmod(0o755)
    place.mount()
    assert not readable(place.path(name) + b"/open")


@pytest.mark.full
def test_a_user_mounts_by_himself(place: Place, tmp_path: Path) -> None:
    """A user without privileges reads his repository through fusermount3, and takes the view away as he likes."""
    write(place.root / "a", b"mine")
    name = place.snapshot()
    place.repository.close()
    for path in (tmp_path, *tmp_path.parents[:3]):
        if path.stat().st_uid == 0 and path != Path("/tmp"):
            path.chmod(0o755)
    for folder, names, files in os.walk(tmp_path):
        for one in (folder, *(os.path.join(folder, some) for some in (*names, *files))):
            os.chown(one, _OTHER_USER, _OTHER_USER, follow_symlinks=False)
    # As distributions have it: open to all users.
    os.mknod(tmp_path / "fuse", stat.S_IFCHR | 0o666, Path("/dev/fuse").stat().st_rdev)
    (tmp_path / "fuse").chmod(0o666)
    user = ("setpriv", f"--reuid={_OTHER_USER}", f"--regid={_OTHER_USER}", "--clear-groups")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    entry = f"other:x:{_OTHER_USER}:{_OTHER_USER}::/:/bin/sh\n"
    (tmp_path / "passwd").write_text(Path("/etc/passwd").read_text() + entry)
    (tmp_path / "passwd").chmod(0o644)
    script = 'mount --bind "$1/fuse" /dev/fuse && mount --bind "$1/passwd" /etc/passwd && shift && exec "$@"'
    place.served = served = subprocess.Popen(
        [
            "unshare",
            "-m",
            "--propagation",
            "slave",
            "sh",
            "-c",
            script,
            "sh",
            tmp_path,
            *user,
            *place.command("mount", place.view),
        ],
        env=environment,
    )
    there = Path(f"/proc/{served.pid}/mounts")
    until("the mount", lambda: f" {place.view} fuse.ciuic-view ro,nosuid,nodev" in there.read_text())
    inside = ("timeout", "30", "nsenter", "-t", str(served.pid), "-m", *user)
    shown = os.fsdecode(place.path(name)) + "/a"
    assert subprocess.run([*inside, "cat", shown], stdout=subprocess.PIPE, check=True).stdout == b"mine"
    subprocess.run([*inside, "fusermount3", "-u", str(place.view)], check=True)
    assert served.wait(30) == 0


@pytest.mark.full
def test_damage_is_an_error_of_that_file_alone(place: Place) -> None:
    """A flipped bit of content ends with EIO there, is told in words, and the rest is read."""
    contents = {f"f{number}": random.Random(number).randbytes(50_000) for number in range(8)}
    for name, content in contents.items():
        write(place.root / name, content)
    place.snapshot()
    bad = contents["f3"][20_000:20_100]
    flipped = 0
    for path in (place.top / "repository" / "packs").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(bad)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([bad[0] ^ 1]))
            flipped += 1
    assert flipped == 1
    place.mount()
    shown = Path(os.fsdecode(place.path()))
    for name, content in contents.items():
        if name == "f3":
            with pytest.raises(OSError, match="Input/output error"):
                (shown / name).read_bytes()
        else:
            assert (shown / name).read_bytes() == content
    assert place.end() == 0
    assert place.messages.read_text().count("do not match its id") == 1


@pytest.mark.full
def test_many_programs_read_at_once(place: Place) -> None:
    """A large directory is listed whole, and eight readers at random offsets get what was stored."""
    names = {f"name {number:05}" for number in range(3000)}
    for name in names:
        (place.root / name).touch()
    content = random.Random(1).randbytes(3_000_001)
    write(place.root / "large", content)
    place.snapshot()
    place.mount()
    shown = Path(os.fsdecode(place.path()))

    def read(seed: int) -> int:
        chance = random.Random(seed)
        with (shown / "large").open("rb", buffering=0) as file:
            for _ in range(200):
                at, length = chance.randrange(len(content)), chance.randrange(1, 70_000)
                if os.pread(file.fileno(), length, at) != content[at : at + length]:
                    return 0
        return len(os.listdir(shown))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {len(names) + 1}
    assert set(os.listdir(shown)) == names | {"large"}


def test_a_remote_is_looked_into(place: Place, tmp_path: Path) -> None:
    """Files of a remote are read without a repository."""
    host = RemoteHost(
        tmp_path / "host", new_remote(open_objects(f"file://{tmp_path}/remote", make=True), sealed=False)
    )
    write(host.root / "a", b"far away" * 5000)
    host.snapshot()
    host.upload()
    place.mount(repo=f"file://{tmp_path}/remote")
    found = list(Path(place.view).glob(f"*/{str(host.root).lstrip('/')}/a"))
    assert [path.read_bytes() for path in found] == [b"far away" * 5000] * 2


@pytest.mark.full
def test_what_is_refused(place: Place) -> None:
    """A directory with something in it, an unknown id, and a directory that cannot be made are told; nothing is mounted."""
    place.snapshot()
    write(place.view / "something", b"here")
    for words, code in ((("mount", place.view), 1), (("mount", place.top / "other", "cs-ffffff"), 3)):
        done = subprocess.run(place.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert not place.is_mounted


@pytest.mark.full
def test_a_view_of_a_killed_process_can_be_taken_away(place: Place) -> None:
    """After SIGKILL of the command programs get errors and do not hang; umount and a new view work."""
    write(place.root / "a", b"a")
    place.snapshot()
    place.mount()
    assert place.served is not None
    place.served.kill()
    subprocess.run(["timeout", "30", "cat", place.path() + b"/a"], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["timeout", "30", "umount", place.view], check=True)
    place.served.wait(30)
    place.mount()
    assert Path(os.fsdecode(place.path() + b"/a")).read_bytes() == b"a"


def test_a_program_runs_as_if_it_were_then(place: Place) -> None:
    """It sees the directory as it was and may write, at the same time others see it as it is, and nothing of it stays."""
    for name, content in (("model", b"then"), ("gone", b"gone")):
        write(place.root / name, content)
    place.root.chmod(0o750)
    first = place.snapshot()
    write(place.root / "model", b"now")
    (place.root / "gone").unlink()
    place.snapshot()
    before = trees.manifest(place.root)
    script = "cat model gone; printf written > model; cat model; rm gone; touch new; ls; stat -c %a .; read line; exit 7"
    id_ = first.rpartition(b"_")[2].decode()
    process = subprocess.Popen(
        place.command("shell", "--at", id_, "--scratch", place.top, "sh", "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=place.root,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines == [b"thengonewrittenmodel\n", b"new\n", b"750\n"]
    # While it runs.
    trees.assert_same(before, trees.manifest(place.root))
    process.stdin.write(b"\n")
    process.stdin.close()
    process.stdout.close()
    assert process.wait(30) == 7
    trees.assert_same(before, trees.manifest(place.root))
    assert [path.name for path in place.top.iterdir() if path.name.startswith("ciuic-shell")] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "code"),
    [("kill -TERM $$", 128 + 15), ("exit 3", 3), ("sleep 60 > /dev/null 2>&1 & echo $!; exit 0", 0)],
)
def test_a_shell_ends_with_its_program(place: Place, script: str, code: int) -> None:
    """With its exit code or signal, also where it leaves a program behind; an interrupt is the program's."""
    write(place.root / "a", b"a")
    place.snapshot()
    done = subprocess.run(
        place.command("shell", "--scratch", place.top, "sh", "-c", script),
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    if done.stdout:
        os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == code
    assert [path.name for path in place.top.iterdir() if path.name.startswith("ciuic-shell")] == []


@pytest.mark.full
def test_a_shell_that_cannot_be(place: Place) -> None:
    """An unknown root, and a root that is not there now, are told; nothing is left."""
    place.snapshot()
    done = subprocess.run(
        place.command("shell", "-p", "/elsewhere"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, "is no root of" in done.stderr) == (3, True)
    place.root.rmdir()
    done = subprocess.run(place.command("shell", "true"), capture_output=True, text=True, check=False)
    assert (done.returncode, "is no directory now" in done.stderr) == (1, True)
    place.root.mkdir()


@pytest.mark.full
def test_a_shell_begins_where_the_caller_is(place: Place) -> None:
    """Outside of the roots too; in the first root where the snapshot has no such directory."""
    write(place.root / "sub" / "a", b"a")
    place.snapshot()
    write(place.root / "later" / "b", b"b")
    for here, expected in (
        (place.top, place.top),
        (place.root / "sub", place.root / "sub"),
        (place.root / "later", place.root),
    ):
        done = subprocess.run(
            place.command("shell", "--scratch", place.top, "pwd"),
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout.strip(), done.returncode) == (str(expected), 0), done.stderr


_SILENT = """
import sys, threading
from ciuic.cli import main
from ciuic.view import mount
from ciuic.view.tree import ViewTree
ViewTree.read = lambda *arguments: threading.Event().wait()
plain = mount.MountedView
mount.MountedView = lambda *arguments, **options: plain(*arguments, **{**options, "may_wait": True})
sys.argv[0] = "ciuic"
main()
"""


@pytest.mark.full
def test_programs_do_not_wait_for_a_silent_store_for_ever(place: Place) -> None:
    """Where the store does not answer, a program that reads can be interrupted, as can one that waits behind it; so can the command."""
    write(place.root / "a", b"a")
    place.snapshot()
    command = place.command("mount", place.view)
    place.serve([command[0], "-c", _SILENT, *command[3:]])
    shown = os.fsdecode(place.path()) + "/a"
    # Its attributes are known, its content waits.
    assert os.stat(shown).st_size == 1
    reader = subprocess.Popen(["cat", shown], stderr=subprocess.DEVNULL)
    lister = subprocess.Popen(["ls", place.view], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(1)
    # As df does of every file system.
    df = subprocess.run(["timeout", "20", "stat", "-f", place.view], stdout=subprocess.DEVNULL, check=False)
    assert df.returncode == 0
    for process in (lister, reader):
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert place.end() == 0


@pytest.mark.full
def test_what_a_killed_shell_left_is_taken_away(place: Place) -> None:
    """The next shell detaches its view and removes its directory."""
    write(place.root / "a", b"a")
    place.snapshot()
    words = ("shell", "--scratch", place.top, "sh", "-c")
    killed = subprocess.Popen(place.command(*words, "echo begun; exec sleep 60"), stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"begun\n"
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    killed.kill()
    killed.wait(30)
    killed.stdout.close()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    left = [path for path in place.top.iterdir() if path.name.startswith("ciuic-shell")]
    assert len(left) == 1
    assert subprocess.run(place.command(*words, "exit 0"), timeout=60, check=False).returncode == 0
    assert not left[0].exists()
    assert mounts.mount_at(str(left[0] / "view")) is None


def _bisect(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        place.command("bisect", "--scratch", place.top, *words),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.full
def test_the_first_bad_snapshot_is_found_by_a_command(place: Place) -> None:
    """In few trials, each of which sees the root as it was; the files of today stay as they are, whatever a trial writes."""
    ids = []
    for number in range(10):
        write(place.root / "loss", b"nan" if number >= 6 else b"0.5")
        write(place.root / "step", b"%d" % number)
        ids.append(take(place.repository, place.root).id)
    before = trees.manifest(place.root)
    script = f"cat {place.root}/step; echo > {place.root}/loss.tried; grep -q 0.5 {place.root}/loss"
    done = _bisect(place, "--good", ids[0], "--json", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["first_bad"], document["last_good"]) == (ids[6], ids[5])
    assert len(document["trials"]) <= 4
    assert all(
        trial["result"] == ("good" if trial["id"] in ids[:6] else "bad") for trial in document["trials"]
    )
    trees.assert_same(before, trees.manifest(place.root))
    # Some cannot be tried: those that no trial can tell apart are named.
    skipping = f"case $(cat {place.root}/step) in 5|6) exit 125;; esac; {script}"
    done = _bisect(place, "--good", ids[1], "--bad", ids[8], "--json", "sh", "-c", skipping)
    assert done.returncode == 8, done.stderr
    assert json.loads(done.stdout)["suspects"] == [ids[5], ids[6], ids[7]]


@pytest.mark.parametrize("waiting", ["exec sleep 60", "trap 'kill $!; exit 1' INT; sleep 60 & wait"])
def test_an_interrupt_ends_a_bisection(place: Place, waiting: str) -> None:
    """^C ends the program and the search with 130, whatever the program makes of it, and nothing is left mounted."""
    first = take(place.repository, place.root).id
    for number in range(2):
        write(place.root / "step", b"%d" % number)
        place.snapshot()
    script = f"touch {place.top}/began; {waiting}"
    command = place.command("bisect", "--scratch", place.top, "--good", first, "sh", "-c", script)
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        until("the program", (place.top / "began").exists)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said.splitlines()[-1]) == (130, b"interrupted")
    assert not list(place.top.glob("ciuic-shell-*"))


@pytest.mark.full
def test_a_bisection_that_cannot_tell_anything_ends(place: Place) -> None:
    """A program that is not there, or that a signal ends, says nothing of a snapshot; good must be before bad."""
    ids = []
    for number in range(3):
        write(place.root / "step", b"%d" % number)
        ids.append(take(place.repository, place.root).id)
    done = _bisect(place, "--good", ids[0], "no-such-program")
    assert (done.returncode, "could not be run" in done.stderr) == (1, True), done.stderr
    done = _bisect(place, "--good", ids[0], "sh", "-c", "kill -SEGV $$")
    assert (done.returncode, "ended by a signal" in done.stderr) == (1, True), done.stderr
    for always, end in (("true", ids[2]), ("false", ids[0])):
        done = _bisect(place, "--good", ids[0], "--bad", ids[2], always)
        assert (done.returncode, f"{end} is" in done.stderr) == (2, True), done.stderr
    done = _bisect(place, "--good", ids[2], "--bad", ids[0], "true")
    assert (done.returncode, "is not older" in done.stderr) == (2, True), done.stderr


@pytest.mark.full
def test_a_directory_with_a_dead_view_is_told(place: Place) -> None:
    """After the process of a view was killed the same command says what stands there, and how it goes."""
    place.snapshot()
    place.mount()
    assert place.served is not None
    place.served.kill()
    place.served.wait(30)
    done = subprocess.run(
        place.command("mount", place.view), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, f"umount {place.view}" in done.stderr) == (1, True), done.stderr
    subprocess.run(["umount", "-l", place.view], check=True, timeout=30)


@pytest.mark.full
@pytest.mark.parametrize("at", ["root", "above"])
def test_a_shell_shows_nothing_where_a_link_leads(place: Place, at: str) -> None:
    """Whoever owns the directory above a root may replace it by a link: nothing is mounted over what that leads to."""
    root = place.top / "home" / "data"
    write(root / "tool", b"evil")
    take(place.repository, root)
    victim = place.top / "victim"
    write(victim / "tool", b"trusted")
    write(victim / "data" / "tool", b"trusted")
    moved = root if at == "root" else root.parent
    moved.rename(place.top / "moved")
    moved.symlink_to(victim)
    for words in (("shell", "--at", "latest"), ("bisect", "--good", "latest")):
        command = place.command(*words, "cat", victim / "tool", victim / "data" / "tool")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert "evil" not in done.stdout + done.stderr
        assert done.returncode != 0
    assert (
        "symbolic link"
        in subprocess.run(
            place.command("shell", "true"), capture_output=True, text=True, check=False, timeout=60
        ).stderr
    )


@pytest.mark.parametrize("why", ["another host", "another user"])
def test_root_runs_no_program_of_a_stranger(why: str) -> None:
    """Foreign snapshots need --trust-repository; the command runs as the root's owner, without root's secrets or terminal."""
    # No other user may enter the directories that tests are given.
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        place = Place(Path(top))
        program = place.root / "evaluate"
        program.write_text(
            "#!/bin/sh\nid -u; id -G; printenv CIUIC_REMOTE_PASSPHRASE AWS_SESSION_TOKEN; cat /etc/shadow; exit 0\n"
        )
        program.chmod(0o755)
        # It types into its terminal, for the shell of root's that reads there.
        typist = place.root / "typist"
        typist.write_text(f"#!/bin/sh\n{_TYPES}")
        typist.chmod(0o755)
        os.chown(place.root, 4711, 4712)
        place.snapshot()
        place.repository.close()
        if why == "another user":
            os.chown(place.top / "repository", 4711, 4712)
        environment = {
            **os.environ,
            "CIUIC_REMOTE_PASSPHRASE": "secret",
            "AWS_SESSION_TOKEN": "secret",
            "CIUIC_CONFIG": "/dev/null",
        }

        def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "ciuic", *words, "shell", "--scratch", place.top, program]
            return subprocess.run(
                line, env=environment, capture_output=True, text=True, check=False, timeout=60
            )

        repository = ("--repo", place.top / "repository")
        refused = run(*repository)
        assert (refused.returncode, refused.stdout) == (NotPermitted.exit_code, ""), refused.stderr
        assert why in refused.stderr
        done = run("--trust-repository", *repository)
        assert (done.returncode, done.stdout) == (0, "4711\n4712\n"), done.stderr
        line = [sys.executable, "-m", "ciuic", "--trust-repository", *map(str, repository), "shell"]
        typed = f"{shlex.join([*line, '--scratch', top, str(typist)])}; read -t 1 line; echo got=$line."
        script = shlex.join(["bash", "-c", typed])
        # Open, because script types an end of file where its input ends.
        end, beginning = os.pipe()
        try:
            at_terminal = subprocess.run(
                ["script", "--quiet", "--return", "--command", script, "/dev/null"],
                env=environment, stdin=end, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
        finally:
            os.close(end)
            os.close(beginning)
        assert "has typed" in at_terminal.stdout, at_terminal.stdout
        assert "got=." in at_terminal.stdout, at_terminal.stdout
