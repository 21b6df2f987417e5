"""Tests of the secrets that open key slots."""

from __future__ import annotations

import base64
import copy
import os
import select
import sys
from pathlib import Path

import pytest

from ciuic.errors import CiuicError, NotFound, NotPermitted, UsageError
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.key_slots import SlotSecret, passphrase_secret, read_key_file, run_key_command
from ciuic.remote.sealing.sealer import MasterKey

KEY = bytes(range(32))


def key_file(tmp_path: Path, data: bytes, mode: int = 0o600) -> str:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "data",
    [KEY.hex().encode(), b"\n " + KEY.hex().upper().encode() + b" \r\n", base64.b64encode(KEY) + b"\n"],
)
def test_a_key_file_is_hexadecimal_or_base64(tmp_path: Path, data: bytes) -> None:
    """Both notations give the 32 bytes, whatever white space is around them."""
    found = read_key_file(key_file(tmp_path, data))
    assert (found.kind, found.reveal()) == ("key-file", KEY)


def test_a_new_key_can_be_read(tmp_path: Path) -> None:
    """What is written to a new key file is read again, and is another key each time."""
    text = key_slots.new_key_text()
    assert read_key_file(key_file(tmp_path, text)).reveal() == bytes.fromhex(text.decode())
    assert key_slots.new_key_text() != text


@pytest.mark.parametrize(
    "data",
    [b"", KEY, KEY.hex().encode()[:-1], base64.b64encode(KEY[:-1]), b"\xff" * 64, b"zz" * 32, b"0" * 5000],
)
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, data: bytes) -> None:
    """A file without a key is refused, and nothing of its content is in the message."""
    with pytest.raises(UsageError) as caught:
        read_key_file(key_file(tmp_path, data))
    assert not data or data[:8].decode("latin-1") not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    """A key file must be its owner's alone."""
    with pytest.raises(NotPermitted, match="others may use"):
        read_key_file(key_file(tmp_path, KEY.hex().encode(), mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """A key that another user may exchange is not used."""
    path = key_file(tmp_path, KEY.hex().encode())
    os.chown(path, 12345, 12345)
    with pytest.raises(NotPermitted, match="12345"):
        read_key_file(path)


def test_a_key_file_is_a_regular_file(tmp_path: Path) -> None:
    """Links, pipes and directories are refused at once, and a missing file is named."""
    path = key_file(tmp_path, KEY.hex().encode())
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "."):
        with pytest.raises(NotPermitted):
            read_key_file(str(tmp_path / name))
    with pytest.raises(NotFound, match="missing"):
        read_key_file(str(tmp_path / "missing"))


def test_a_command_gives_its_output() -> None:
    """A command is started without a shell, and its output is a key as in a file."""
    program = "import sys; print(sys.argv[1])"
    found = run_key_command([sys.executable, "-c", program, KEY.hex()])
    assert (found.kind, found.reveal()) == ("command", KEY)
    with pytest.raises(UsageError, match=r"\$\(echo\)"):
        run_key_command(["$(echo)"])


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], UsageError),
        ([""], UsageError),
        (["/nonexistent/program"], UsageError),
        ([sys.executable, "-c", "print('secret-text')"], UsageError),
        ([sys.executable, "-c", f"print('{KEY.hex()}'); raise SystemExit(3)"], UsageError),
        ([sys.executable, "-c", "while True: print('x' * 1000)"], UsageError),
        ([sys.executable, "-c", "import time; time.sleep(600)"], NotPermitted),
        ([sys.executable, "-c", "import os, time; os.close(1); time.sleep(600)"], NotPermitted),
        (["sh", "-c", "sleep 600 & exit 0"], NotPermitted),
    ],
    ids=["none", "empty", "missing", "no key", "status", "endless", "slow", "closed", "child"],
)
def test_a_command_that_gives_no_key_is_ended(argv: list[str], error: type[CiuicError]) -> None:
    """A command that fails, prints something else or does not end is an error that shows no output."""
    # Only those that hang are refused for their time.
    with pytest.raises(error) as caught:
        run_key_command(argv, timeout_seconds=0.5 if error is NotPermitted else 60)
    assert "secret-text" not in str(caught.value)
    assert KEY.hex() not in str(caught.value)


def test_the_children_of_a_command_end_with_it(tmp_path: Path) -> None:
    """A child that a command leaves is killed when the time is over."""
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    # The child keeps the pipe open for writing: a reader sees its end when the child is dead.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NotPermitted):
        run_key_command(["sh", "-c", f"exec 3>'{pipe}'; sleep 600 & echo up >&3; exit 0"], timeout_seconds=3)
    assert os.read(reader, 9) == b"up\n"
    ended = select.poll()
    ended.register(reader, select.POLLHUP)
    assert ended.poll(120_000)
    os.close(reader)


@pytest.mark.parametrize("passphrase", ["", "x" * 5000, "\ud800"])
def test_impossible_passphrases_are_refused(passphrase: str) -> None:
    """An empty, endless or undecodable passphrase is refused."""
    with pytest.raises(UsageError, match="passphrase"):
        passphrase_secret(passphrase)


def test_a_passphrase_does_not_depend_on_the_keyboard() -> None:
    """Composed and decomposed letters are one passphrase."""
    assert passphrase_secret("Äpfel").reveal() == passphrase_secret("A\u0308pfel").reveal()


@pytest.mark.parametrize("secret", [SlotSecret("key-file", KEY), MasterKey(KEY)])
def test_secrets_are_neither_shown_nor_stored(secret: object) -> None:
    """No repr, str, pickle or copy has the secret bytes."""
    for text in (repr(secret), str(secret), f"{secret}", repr([secret])):
        assert "secret>" in text
        assert KEY.hex() not in text
        assert repr(KEY)[2:20] not in text
    # pickle and copy both begin with this protocol.
    for store in (lambda value: value.__reduce_ex__(4), copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            store(secret)


def test_master_keys_are_compared_by_value() -> None:
    """Equal keys are equal, others are not, and none is hashed by its secret."""
    assert MasterKey(KEY) == MasterKey(KEY)
    assert MasterKey(KEY) != MasterKey(KEY[::-1])
    assert MasterKey(KEY) != KEY
    assert MasterKey.generate() != MasterKey.generate()
    with pytest.raises(TypeError):
        hash(MasterKey(KEY))
    with pytest.raises(ValueError, match="32 bytes"):
        MasterKey(KEY[:16])
