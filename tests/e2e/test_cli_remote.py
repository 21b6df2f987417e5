"""`ciuic remote`, run as installed over directories: init, join, keys, upload, status, and the wait for a remote."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli_repository import Host
from support.live import installed
from support.until import until

from ciuic.remote.access import key_slots, open_remote
from ciuic.remote.documents import _encode
from ciuic.remote.object_names import REMOTE_JSON
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import read_key_file, show_recovery_key
from ciuic.repository import Repository
from ciuic.repository.identity import BLAKE3, XXH3


@pytest.fixture
def host(short_tmp: Path) -> Host:
    return Host(short_tmp / "one")


@pytest.fixture
def other(short_tmp: Path) -> Host:
    return Host(short_tmp / "two")


@pytest.fixture
def url(short_tmp: Path) -> str:
    return f"file://{short_tmp}/nas"


def slots_at(url: str) -> dict[str, str]:
    objects = open_objects(url)
    try:
        return {slot.slot: slot.kind for slot in key_slots(objects)}
    finally:
        objects.close()


@pytest.fixture
def made(host: Host, url: str) -> dict[str, Any]:
    """Provide a remote that `host` has made, as its JSON document says."""
    document: dict[str, Any] = host.json("remote", "init", url)
    return document


def test_init_makes_keys_configuration_and_repository(host: Host, url: str) -> None:
    """After init: a key file of 0600, two slots, the table [remote], a repository with the remote's identity."""
    done = host.run("remote", "init", url)
    text = done.stdout.decode()
    assert "A LOST KEY IS LOST DATA" in text
    recovery = next(line.strip() for line in text.splitlines() if line.strip().startswith("ciuic-"))
    assert slots_at(url) == {"host": "key-file", "recovery": "recovery"}
    assert stat.S_IMODE(host.key_file.stat().st_mode) == 0o600
    configuration = host.config.read_text()
    assert f'url = "{url}"\nkey_file = "{host.key_file}"\n' in configuration
    assert host.identity().hash == BLAKE3
    # What is printed once is nowhere else, and the key of the host is never printed.
    written = [path for path in host.top.parent.rglob("*") if path.is_file()]
    assert not any(recovery.encode() in path.read_bytes() for path in written)
    assert host.key_file.read_text().strip() not in text + done.stderr.decode()


def test_init_never_replaces_a_remote_or_a_key(host: Host, url: str, made: dict[str, Any]) -> None:
    """A second init refuses for the remote; one elsewhere for the key file. Nothing changes. An interrupted init is told apart."""
    before = {path: path.read_bytes() for path in host.top.parent.rglob("*") if path.is_file()}
    assert "there is a remote at" in host.fails("remote", "init", code=1)
    said = host.fails(
        "remote", "init", f"{url}2", "--name", "remote2", "--key-file", str(host.key_file), code=2
    )
    assert "never overwritten" in said
    assert {path: path.read_bytes() for path in host.top.parent.rglob("*") if path.is_file()} == before
    for path in (Path(url.removeprefix("file://")) / "keys").iterdir():
        path.unlink()
    assert "an earlier `remote init` was interrupted" in host.fails("remote", "init", code=1)


def test_init_of_a_configured_remote_changes_no_configuration(host: Host, url: str) -> None:
    """With url and key_file configured, the operator's own key is used and the file stays byte for byte."""
    key = host.top / "own.key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    with host.config.open("a") as file:
        file.write(f'[remote]\nname = "nas"\nurl = "{url}" # the rack\nkey_file = "{key}"\n')
    before = host.config.read_bytes()
    document = host.json("remote", "init")
    assert (document["remote"], document["key_file"], document["config_changed"]) == ("nas", str(key), False)
    assert host.config.read_bytes() == before
    assert host.json("remote", "join")["slot"] == "host"


def test_a_remote_in_clear_is_asked_for(host: Host, other: Host, url: str) -> None:
    """A remote in clear needs a yes, is written down as such, and has no keys; it gets nothing from a host that was not told so."""
    assert "-y" in host.fails("remote", "init", url, "--no-encryption", code=2)
    assert not Path(url.removeprefix("file://")).exists()
    document = host.json("remote", "init", url, "--no-encryption", "-y")
    assert (document["encrypted"], document["recovery_key"], document["key_file"]) == (False, None, None)
    assert "encryption = false" in host.config.read_text()
    assert slots_at(url) == {}
    host.run("remote", "upload", "--once")
    with other.config.open("a") as file:
        file.write(f'[remote]\nurl = "{url}"\n')
    Repository.create(other.repository).close()
    assert "not encrypted" in other.fails("remote", "upload", "--once", code=7)


def test_join_with_each_kind_of_key(host: Host, short_tmp: Path, url: str) -> None:
    """A host joins with a key file, passphrase or recovery key, gets a slot of its own, and shares chunks."""
    host.env["CIUIC_REMOTE_PASSPHRASE"] = "correct horse"
    recovery = host.json("remote", "init", url, "--passphrase")["recovery_key"]
    for way, variables, arguments in (
        ("key-file", {}, ["--open-with", str(host.key_file)]),
        ("passphrase", {"CIUIC_REMOTE_PASSPHRASE": "correct horse"}, []),
        ("recovery", {"CIUIC_REMOTE_RECOVERY_KEY": recovery.lower()}, []),
    ):
        other = Host(short_tmp / way)
        slots = slots_at(url)
        own = dict(other.env)
        other.env |= variables
        document = other.json("remote", "join", url, *arguments)
        assert document["slot"].startswith("host-")
        assert document["slot"] not in slots
        assert document["repository_state"] == "made"
        assert other.identity() == host.identity()
        # From now on its own key is enough, and joining again changes nothing.
        other.env = own
        before = slots_at(url)
        assert "a key of its own" in other.fails("remote", "join", "--key-file", "/elsewhere", code=2)
        again = other.json("remote", "join")
        assert (again["slot"], again["config_changed"], again["repository_state"]) == (
            document["slot"],
            False,
            "shares",
        )
        assert slots_at(url) == before


def test_join_without_or_with_a_wrong_key_changes_nothing(
    other: Host, made: dict[str, Any], url: str
) -> None:
    """Without a key that fits, join writes neither configuration nor key file nor slot."""
    before, slots = other.config.read_bytes(), slots_at(url)
    assert "none was given" in other.fails("remote", "join", url, code=2)
    other.env["CIUIC_REMOTE_RECOVERY_KEY"] = show_recovery_key(bytes(32))
    other.run("remote", "join", url, expect=7)
    assert (other.config.read_bytes(), slots_at(url)) == (before, slots)
    assert not other.key_file.exists()
    assert not other.repository.exists()


@pytest.mark.parametrize("flaw", ["cannot be edited", "several", "no place for a repository"])
def test_nothing_is_made_for_a_host_that_cannot_use_the_remote(
    host: Host, other: Host, made: dict[str, Any], url: str, flaw: str
) -> None:
    """Where the configuration cannot be edited or the repository be made, join and init write nothing to a bucket and make no key."""
    if flaw == "no place for a repository":
        os.chown(other.repository.parent, 54321, 54321)
        names = ["--name", "remote"]
    else:
        text = f'url = "{url}"' if flaw == "cannot be edited" else 'url = "gs://another"'
        table = f"remote = {{ {text} }}" if flaw == "cannot be edited" else f"[remote]\n{text}"
        before = other.config.read_text()
        other.config.write_text(
            f"{table}\n{before}" if "=" in table.split("[")[0] else f"{before}\n{table}\n"
        )
        names = [] if flaw == "cannot be edited" else ["--name", "second"]
    configuration, slots = other.config.read_bytes(), slots_at(url)
    command = [str(installed()), "remote", "join", url, "--open-with", str(host.key_file), *names]
    for arguments in (command, [str(installed()), "remote", "init", f"{url}-2", "--name", "third"]):
        done = subprocess.run(arguments, env=other.env, capture_output=True, timeout=120, check=False)
        assert done.returncode not in (0, 70), done.stderr
        assert b"error: " in done.stderr
    assert slots_at(url) == slots
    assert other.config.read_bytes() == configuration
    assert not Path(f"{url}-2".removeprefix("file://"), "remote.json").exists()
    assert not list(other.top.glob("*.key"))


def test_join_keeps_a_repository_with_snapshots(
    host: Host, other: Host, made: dict[str, Any], url: str, short_tmp: Path
) -> None:
    """A repository with snapshots keeps its identity and content; one that holds nothing is replaced by one with the remote's identity."""
    empty = Host(short_tmp / "empty")
    for one in (other, empty):
        Repository.create(one.repository).close()
    id_ = other.snapshot_of(b"precious")
    arguments = ("remote", "join", url, "--open-with", str(host.key_file))
    assert b"keeps its own identity" in other.run(*arguments).stderr
    assert other.identity().hash == XXH3
    assert [row.id for row in other.list()] == [id_]
    assert empty.json(*arguments)["repository_state"] == "replaced"
    assert empty.identity() == host.identity()


def test_join_says_who_shares_no_chunks(host: Host, other: Host, url: str) -> None:
    """Where the first host kept its own identity, the second one does not share chunks with all."""
    Repository.create(host.repository).close()
    host.snapshot_of(b"precious")
    host.run("remote", "init", url)
    done = other.run("remote", "join", url, "--open-with", str(host.key_file))
    assert other.identity() != host.identity()
    assert b"but those whose repository kept its own identity" in b" ".join(done.stderr.split())


def test_protect_takes_the_identity_of_the_remote(host: Host, url: str) -> None:
    """`protect` on a host with a remote makes a repository that shares chunks; with --offline one with an identity of its own, and the remote is not asked."""
    host.run("remote", "init", url)
    same = host.identity()
    root = host.top / "root"
    root.mkdir()
    nas = Path(url.removeprefix("file://"))
    shutil.rmtree(host.repository)
    nas.rename(f"{nas}-away")
    assert "--offline" in host.fails("protect", str(root), code=1)
    assert not host.repository.exists()
    assert str(root) not in host.config.read_text()
    Path(f"{nas}-away").rename(nas)
    host.run("protect", str(root))
    assert host.identity() == same
    shutil.rmtree(host.repository)
    (host.top / "another").mkdir()
    host.run("protect", "--offline", str(host.top / "another"))
    assert host.identity().hash == XXH3


def test_a_directory_that_is_not_there_says_what_to_do(host: Host, short_tmp: Path) -> None:
    """The error of `remote test` in a directory that nobody has made yet names what makes it."""
    place = short_tmp / "not-there"
    complaint = host.fails("remote", "test", f"file://{place}", code=1)
    assert "there is no such directory" in complaint
    assert f"mkdir -p {place}" in complaint


def test_keys_are_listed_added_and_removed(
    host: Host, other: Host, made: dict[str, Any], url: str, short_tmp: Path
) -> None:
    """Slots of each kind can be added and removed; a removed key opens nothing; the last slot stays."""
    host.env["CIUIC_REMOTE_PASSPHRASE"] = "battery staple"
    host.run("remote", "keys", "add", "--passphrase")
    del host.env["CIUIC_REMOTE_PASSPHRASE"]
    second = host.top / "second.key"
    host.run("remote", "keys", "add", "--key-file", str(second), "--slot", "spare")
    assert host.json("remote", "keys", "add", "--recovery", "--slot", "safe")["recovery_key"].startswith(
        "ciuic-"
    )
    listed = host.json("remote", "keys", "list")["slots"]
    assert {one["slot"]: one["kind"] for one in listed} == {
        "host": "key-file",
        "recovery": "recovery",
        "passphrase": "passphrase",
        "spare": "key-file",
        "safe": "recovery",
    }
    assert "is a key slot host already" in host.fails(
        "remote", "keys", "add", "--recovery", "--slot", "host", code=2
    )
    other.env["CIUIC_REMOTE_KEY_FILE"] = str(second)
    other.run("remote", "join", url)
    assert "nobody to ask" in host.fails("remote", "keys", "remove", "spare", code=2)
    host.run("remote", "keys", "remove", "spare", "-y")
    third = Host(short_tmp / "three")
    third.env["CIUIC_REMOTE_KEY_FILE"] = str(second)
    third.run("remote", "join", url, expect=7)
    for slot in sorted(slots_at(url)):
        if slot != "host":
            done = host.run("remote", "keys", "remove", slot, "-y")
            # The slots are removed by name: recovery before safe.
            assert (b"last recovery key" in done.stderr) == (slot == "safe")
    assert "last key slot" in host.fails("remote", "keys", "remove", "host", "-y", code=2)
    host.run("remote", "keys", "remove", "host", "nowhere", "-y", expect=3)


def test_keys_of_the_remote_that_is_named(
    host: Host, made: dict[str, Any], url: str, short_tmp: Path
) -> None:
    """--repo, as CIUIC_REPO, names the remote whose keys are listed and removed; the configured one keeps its own."""
    elsewhere = f"file://{short_tmp}/elsewhere"
    third = Host(short_tmp / "third")
    third.run("remote", "init", elsewhere)
    third.env["CIUIC_REMOTE_PASSPHRASE"] = "another one"
    third.run("remote", "keys", "add", "--passphrase", "--slot", "spare")
    host.env["CIUIC_REMOTE_KEY_FILE"] = str(third.key_file)
    kept = slots_at(url)
    assert "spare" in host.run("--repo", elsewhere, "remote", "keys", "list").stdout.decode()
    host.run("--repo", elsewhere, "remote", "keys", "remove", "spare", "-y")
    assert "spare" not in slots_at(elsewhere)
    host.env["CIUIC_REPO"] = elsewhere
    host.run("remote", "keys", "remove", "recovery", "-y")
    assert set(slots_at(elsewhere)) == {"host"}
    assert slots_at(url) == kept


def test_a_bad_object_among_the_keys_stops_no_command(host: Host, made: dict[str, Any], url: str) -> None:
    """Beside objects that are no key slots a host uploads, checks and repairs; they are listed, named and removed."""
    keys = Path(url.removeprefix("file://")) / "keys"
    bad = {"aa": b"<html>Sign in</html>", "bb": bytes(100_000), "Not.A.Slot": b"x"}
    for name, data in bad.items():
        (keys / name).write_bytes(data)
    host.run("remote", "upload", "--once")
    host.run("check", "--remote", "--repair", expect=4)
    host.run("remote", "status", "--contact")
    done = host.run("remote", "keys", "list")
    assert b"3 objects below keys/ cannot be used" in done.stderr
    assert all(name.encode() in done.stdout for name in (*bad, "host", "recovery"))
    listed = host.json("remote", "keys", "list")
    assert {one["slot"] for one in listed["slots"]} == {"host", "recovery"}
    assert {one["slot"] for one in listed["unusable"]} == set(bad)
    for name in bad:
        host.run("remote", "keys", "remove", name, "-y")
    assert {path.name for path in keys.iterdir()} == {"host", "recovery"}


def test_a_typed_passphrase_is_not_shown(host: Host, made: dict[str, Any]) -> None:
    """On a terminal a passphrase is asked for twice, and what is typed is not echoed."""
    parent, child = pty.openpty()
    command = [str(installed()), "remote", "keys", "add", "--passphrase"]
    process = subprocess.Popen(
        command, env=host.env, stdin=child, stdout=child, stderr=child, start_new_session=True
    )
    os.close(child)
    shown = b""

    def answer(prompt: bytes) -> None:
        nonlocal shown
        while prompt not in shown:
            shown += os.read(parent, 1024)
        os.write(parent, b"my secret words\n")

    answer(b"New passphrase: ")
    answer(b"Repeat for confirmation: ")
    try:
        while block := os.read(parent, 1024):
            shown += block
    except OSError:  # the last process has closed the terminal
        pass
    os.close(parent)
    assert process.wait(60) == 0, shown
    assert b"my secret words" not in shown
    assert b"key slot passphrase added" in shown


def test_upload_once_and_status(host: Host, made: dict[str, Any]) -> None:
    """After `upload --once` the remote is behind by nothing; what it lacked before is counted.

    The price of requests follows from their number and the configured price of a thousand.
    """
    with host.config.open("a") as file:
        file.write("[remote.price]\nput_per_1000 = 1000.0\nget_per_1000 = 0\ngb_month = 1000\n")
    id_ = host.snapshot_of(os.urandom(300_000))
    (before,) = host.json("remote", "status")["remotes"]
    assert (before["behind"]["snapshots"], before["behind"]["stored"], before["upload"]) == (1, 0, None)
    assert before["behind"]["size_bytes"] > 300_000
    assert before["problem"] == "nothing was ever uploaded from this host"
    done = host.run("remote", "upload", "--once")
    # To a pipe the end alone is told, and no bar.
    assert b"everything is stored" in done.stderr
    assert b"\r" not in done.stderr
    (after,) = host.json("remote", "status", "--contact")["remotes"]
    assert (after["behind"]["snapshots"], after["behind"]["seconds"]) == (0, 0)
    assert after["behind"]["newest"] == id_
    assert after["id"] == made["id"] == after["contact"]["id"]
    assert not after["upload"]["running"]
    assert after["upload"]["sent_bytes"] > 300_000
    (space,) = after["contact"]["spaces"]
    assert space["snapshots"] == 1
    requests = after["upload"]["requests"]
    assert after["upload"]["price"] == sum(requests.get(kind, 0) for kind in ("put", "create", "list"))
    assert after["contact"]["price_month"] == after["contact"]["size_bytes"] / 1e6
    # A cache that others may write to is not read.
    host.top.joinpath("open").mkdir()
    host.top.joinpath("open").chmod(0o777)
    host.env["XDG_CACHE_HOME"] = str(host.top / "open")
    text = host.run("remote", "status", "--contact").stdout.decode()
    assert "behind     by nothing" in text


def test_a_single_upload_says_what_it_waits_for(host: Host, made: dict[str, Any], url: str) -> None:
    """Each reason is said once when the upload begins to wait, and also that it goes on."""
    host.snapshot_of(os.urandom(300_000))
    packs = Path(url.removeprefix("file://")) / "packs"
    packs.write_bytes(b"no directory")
    with subprocess.Popen(
        [installed("ciuic"), "remote", "upload", "--once"], env=host.env, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        packs.unlink()
        rest = process.stderr.read()
    assert "waits, and tries again: " in first
    assert "waits" not in rest
    assert "goes on" in rest
    assert process.returncode == 0


def test_a_planted_copy_of_a_log_is_told_once(host: Host, made: dict[str, Any], url: str) -> None:
    """Each entry of it is damaged, because it lies below another name: one warning has the first and the number."""
    for _ in range(3):
        host.snapshot_of(os.urandom(3000))
        host.run("remote", "upload", "--once")
    (log,) = Path(url.removeprefix("file://"), "w").iterdir()
    entries = len(list(shutil.copytree(log, log.with_name("0" * 32)).iterdir()))
    assert entries > 2
    restore = ("restore", "-s", "latest", "-p", str(host.top / "root"), "-d", str(host.top / "back"))
    for command in (("list",), ("verify",), restore):
        told = host.fails("--repo", url, *command, code=4)
        assert told.count("warning: ") == 1
        assert f"and so {entries - 1} others" in told


def test_status_without_the_remote(host: Host, made: dict[str, Any], url: str) -> None:
    """Status works while the remote is away; with --contact, and of an upload, the exit code is not 0.

    Nor is it 3, with which the service would stay ended. A remote.json that is lost comes back, and the upload goes on.
    """
    nas = Path(url.removeprefix("file://"))
    nas.rename(f"{nas}-away")
    host.run("remote", "status")
    document = host.json("remote", "status", "--contact", expect=1)
    assert document["remotes"][0]["contact"]["error"]
    Path(f"{nas}-away").rename(nas)
    host.snapshot_of(os.urandom(3000))
    host.run("remote", "upload", "--once")
    (nas / "remote.json").rename(f"{nas}.json")
    host.run("remote", "upload", "--once", expect=4)
    assert host.json("remote", "status")["remotes"][0]["behind"]["stored"] == 0
    host.run("remote", "repair-identity")
    host.run("remote", "upload", "--once")
    host.run("--repo", url, "list")


def test_commands_of_a_remote_need_one(host: Host) -> None:
    """Exit code 3 says that no remote is configured, to systemd as well; no snapshot is taken."""
    for words in (
        ("remote", "status"),
        ("remote", "upload"),
        ("remote", "test"),
        ("snapshot", "--wait=remote"),
    ):
        assert "no remote is configured" in host.fails(*words, code=3)


def test_upload_once_names_what_cannot_be_read(host: Host, made: dict[str, Any]) -> None:
    """A snapshot that is damaged here is not uploaded, and exit code 8 says so."""
    host.snapshot_of(os.urandom(100_000))
    (pack,) = (path for path in (host.repository / "packs").iterdir() if path.stat().st_size > 90_000)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    assert "lacks 1 snapshot" in host.fails("remote", "upload", "--once", code=8)


def test_remote_test_proves_measures_and_leaves_nothing(host: Host, made: dict[str, Any], url: str) -> None:
    """`remote test` proves, measures, opens the remote, and leaves nothing behind."""
    before = sorted(Path(url.removeprefix("file://")).rglob("*"))
    document = host.json("remote", "test", "--size", "4")
    assert document["opens"] == "encrypted"
    assert document["put_bytes_per_second"] > 0
    assert "one winner each" in host.run("remote", "test", "--size", "1").stdout.decode()
    assert [path for path in sorted(Path(url.removeprefix("file://")).rglob("*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]


README = Path(__file__).parents[2] / "README.md"


def test_the_story_of_the_readme(host: Host, other: Host, url: str, short_tmp: Path) -> None:
    """The commands of the README for a machine that is gone bring the files back on another one."""
    block = re.search(r"^```\n(sudo ciuic remote init.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    lines = [line for line in block[1].splitlines() if line.startswith("sudo ciuic ")]
    before = next(index for index, line in enumerate(lines) if " join " in line)

    def run(on: Host, line: str) -> str:
        line = line.replace("s3://my-bucket/training", url).replace(
            "/opt/deepseek/training", str(host.top / "root")
        )
        words = shlex.split(line.replace("/opt/deepseek", str(short_tmp / "back")), comments=True)
        return on.run(*words[2:]).stdout.decode()

    made = "".join(run(host, line) for line in lines[:before])
    other.env["CIUIC_REMOTE_RECOVERY_KEY"] = next(
        line.strip() for line in made.splitlines() if line.strip().startswith("ciuic-")
    )
    (short_tmp / "back").mkdir()
    id_ = host.snapshot_of(b"the run" * 100_000)
    host.run("remote", "upload", "--once")
    shutil.rmtree(host.top)
    said = [run(other, line.replace("cs-38a2b1", id_)) for line in lines[before:]]
    assert id_ in said[1]
    (found,) = (short_tmp / "back").rglob("file")
    assert found.read_bytes() == b"the run" * 100_000


@pytest.fixture
def uploading(host: Host, made: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Provide a running `ciuic remote upload`."""
    with _upload(host) as process:
        yield process
        process.kill()


def _upload(host: Host) -> subprocess.Popen[bytes]:
    command = [str(installed()), "remote", "upload"]
    return subprocess.Popen(command, env=host.env, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_upload_ends_with_0_on_sigterm(host: Host, uploading: subprocess.Popen[bytes]) -> None:
    """The foreground process uploads what comes, shows itself in the status, and ends in good order."""
    id_ = host.snapshot_of(b"soon")

    def newest() -> bool:
        (found,) = host.json("remote", "status")["remotes"]
        return bool(found["behind"]["newest"] == id_ and found["upload"]["running"])

    until("the upload", newest)
    uploading.send_signal(signal.SIGTERM)
    assert uploading.wait(30) == 0


def test_upload_waits_for_a_first_root(host: Host, made: dict[str, Any]) -> None:
    """Without a root, and so without a repository, the process waits and does not end with exit code 2."""
    text = host.config.read_text()
    host.config.write_text(text.replace(f'[repository]\npath = "{host.repository}"\n', ""))
    with _upload(host) as process:
        assert process.stderr is not None
        assert b"waiting until a directory is protected" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.mount
def test_snapshot_waits_for_a_remote_that_wants_it(
    host: Host, uploading: subprocess.Popen[bytes], made: dict[str, Any]
) -> None:
    """`snapshot --wait=remote` returns when the remote has the snapshot; one that the remote's schedule leaves out is told as such."""
    root = host.top / "root"
    root.mkdir()
    with host:
        host.run("protect", str(root))
        host.start(root)
        (root / "file").write_bytes(os.urandom(50_000))
        id_ = host.run("snapshot", "--wait=remote", "-m", "safe").stdout.decode().strip()
        record = json.loads((host.state / "remote" / "stored").read_bytes())
        assert id_ in record["stored"]
        uploading.kill()
        uploading.wait()
        with host.config.open("a") as file:
            file.write('[remote.schedule]\ninterval = "1d"\n')
        with _upload(host) as process:
            (root / "file").write_bytes(b"x")
            host.snapshot()
            assert "does not go to the remote" in host.fails("snapshot", "--wait=remote", code=1)
            process.kill()


def test_a_remote_with_its_packs_elsewhere_is_refused(
    host: Host, other: Host, url: str, made: dict[str, Any]
) -> None:
    """Every command refuses a remote whose packs an earlier version put elsewhere, and changes nothing; with them beside the log its identity is made anew."""
    host.snapshot_of(os.urandom(300_000))
    (snapshot,) = host.json("list")["snapshots"]
    host.run("remote", "upload", "--once")
    place = Path(url.removeprefix("file://"))
    objects = open_objects(url)
    remote = open_remote(objects, [read_key_file(str(host.key_file))])
    stored = msgspec.structs.replace(remote.stored, version=2, packs_url="s3://locked/\x1ba")
    objects.put(REMOTE_JSON, [_encode(stored, remote.master)])
    objects.close()
    (place / "packs").rename(place.with_name("packs"))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    key = ("--open-with", str(host.key_file))
    for command in (
        ("--repo", url, "list"),
        ("--repo", url, "verify", "--all"),
        ("--repo", url, "restore", "-s", snapshot["id"], "-p", "/", "-d", str(host.top / "back")),
        ("check", "--remote", "--repair"),
        ("prune", "--remote"),
        ("forget", "--remote", "-y", snapshot["id"]),
        ("remote", "upload", "--once"),
        ("remote", "drill"),
        ("remote", "keys", "add", "--recovery"),
        ("remote", "keys", "remove", "-y", "recovery"),
        ("remote", "test", "--size", "1"),
    ):
        said = host.fails(*command, code=1)
        assert "its packs in another place than its log, 's3://locked/\\x1ba'" in said, command
    assert "in another place" in host.fails("fleet", "status", code=5)
    assert "in another place" in other.fails("remote", "join", url, *key, code=1)
    assert "in another place" in host.fails("remote", "status", "--contact", code=1)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    place.with_name("packs").rename(place / "packs")
    (place / REMOTE_JSON).unlink()
    host.run("remote", "repair-identity")
    host.run("check", "--remote", "--read-data")
    assert host.json("--repo", url, "list")["snapshots"][0]["id"] == snapshot["id"]
