"""Key of a passphrase: the same by a child process and by this one, and without its memory."""

from __future__ import annotations

import subprocess

import pytest

from ciuic.remote.sealing import passphrase_key
from ciuic.remote.sealing.passphrase_key import Argon2Cost, derive_key

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
