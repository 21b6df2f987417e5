"""Tests of keys that people keep: recovery keys are shown, written down and typed again, and that of a passphrase is always the same."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.remote.sealing import key_slots, passphrase_key
from ciuic.remote.sealing.key_slots import is_recovery_key, parse_recovery_key, show_recovery_key
from ciuic.remote.sealing.passphrase_key import Argon2Cost, derive_key

_KEYS = st.binary(min_size=32, max_size=32)


def test_the_checksum_is_that_of_the_rfc() -> None:
    """CRC-24 of the nine digits is the check value of CRC-24/OPENPGP in the catalogue of CRC algorithms."""
    assert key_slots._crc24(b"123456789") == 0x21CF02


@given(_KEYS)
def test_a_key_is_read_as_it_was_shown(secret: bytes) -> None:
    """The shown text gives the same bytes again, also with other letters, spaces and no prefix."""
    text = show_recovery_key(secret)
    assert len(text) == len("ciuic") + 14 * 5
    assert parse_recovery_key(text) == secret
    assert parse_recovery_key(text.lower().replace("-", " ")) == secret
    assert parse_recovery_key(text.removeprefix("ciuic-").replace("-", "\n")) == secret
    assert parse_recovery_key(text.replace("1", "l").replace("0", "O")) == secret
    assert parse_recovery_key(text.replace("1", "I").replace("0", "o")) == secret


@given(_KEYS, st.integers(0, 55), st.integers(1, 31))
def test_a_wrong_character_is_found(secret: bytes, at: int, by: int) -> None:
    """One wrong character is always noticed, and the hint names its group."""
    groups = show_recovery_key(secret).split("-")[1:]
    typed = list("".join(groups))
    alphabet = key_slots._ALPHABET
    typed[at] = alphabet[(alphabet.index(typed[at]) + by) % 32]
    with pytest.raises(UsageError) as caught:
        parse_recovery_key("".join(typed))
    assert caught.value.hint == f"look at group {at // 4 + 1} of 14"
    assert "".join(typed) not in str(caught.value)


@given(_KEYS, st.integers(0, 54))
def test_swapped_neighbours_are_found(secret: bytes, at: int) -> None:
    """Two neighbours in the wrong order never give another key."""
    typed = list("".join(show_recovery_key(secret).split("-")[1:]))
    typed[at], typed[at + 1] = typed[at + 1], typed[at]
    text = "".join(typed)
    if typed[at] == typed[at + 1]:
        assert parse_recovery_key(text) == secret
        return
    with pytest.raises(UsageError, match="typing error"):
        parse_recovery_key(text)


@pytest.mark.parametrize("text", ["", "ciuic", "ciuic-" + "0" * 55, "0" * 57, "U" * 56, "ü" * 56, "0" * 56])
def test_other_texts_are_refused(text: str) -> None:
    """Texts of other lengths or characters, or without a right checksum, are no keys."""
    with pytest.raises(UsageError, match="recovery key"):
        parse_recovery_key(text)


def test_only_whole_keys_are_shown() -> None:
    """A key of another length is an error of the caller."""
    with pytest.raises(ValueError, match="32 bytes"):
        show_recovery_key(os.urandom(31))


@given(_KEYS)
def test_a_key_is_told_from_a_passphrase(secret: bytes) -> None:
    """What was shown counts as a key, however it is typed, also with a typing error behind the prefix; words do not."""
    text = show_recovery_key(secret)
    for typed in (text, text.lower(), f" {text.replace('-', ' ')}\n", text.removeprefix("ciuic-")):
        assert is_recovery_key(typed)
    assert is_recovery_key(text[:-1])
    assert not is_recovery_key("correct horse battery staple")
    assert not is_recovery_key("ciuic is great")
    assert not is_recovery_key("A" * 56)


SALT = bytes(range(16))
COST = Argon2Cost(memory_kib=72 << 10, passes=1, lanes=1)


def test_a_child_derives_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A costly key is derived by a child process alone, with the bytes that this process would derive."""

    def refuse(*args: object) -> bytes:
        raise AssertionError("derived in this process")

    with monkeypatch.context() as patched:
        patched.setattr(passphrase_key, "_derive", refuse)
        found = derive_key("päss".encode(), SALT, COST)
    monkeypatch.setattr(passphrase_key, "_MAX_MEMORY_KIB", COST.memory_kib)
    assert found == derive_key("päss".encode(), SALT, COST)


@pytest.mark.parametrize("fault", ["no process", "no memory"])
def test_without_a_child_this_process_derives_it(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Where no child can be started, or it fails, the key is derived all the same."""

    def run(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        if fault == "no process":
            raise BlockingIOError("fork")
        return subprocess.CompletedProcess([], 1, b"")

    wanted = derive_key(b"secret", SALT, COST)
    monkeypatch.setattr(subprocess, "run", run)
    assert derive_key(b"secret", SALT, COST) == wanted


def test_the_secret_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passphrase goes through a pipe: neither command line nor environment of the child has it."""
    seen: list[str] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        seen.append(f"{command} {options['env']}")
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    derive_key(b"passphrase-of-this-test", SALT, COST)
    (text,) = seen
    assert "passphrase-of-this-test" not in text
    assert b"passphrase-of-this-test".hex() not in text
