"""Secrets that open key slots: passphrases, key files, the output of commands, recovery keys.

Guarantees: a key file that others may read is refused, and a new one has mode 0600; a command is started without
a shell, with a time limit, and nothing that it prints appears in a message.
"""

from __future__ import annotations

import base64
import binascii
import os
import signal
import stat
import subprocess
import time
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal, NoReturn

from ciuic.errors import NotFound, NotPermitted, UsageError
from ciuic.remote.sealing.recovery_key import is_recovery_key, parse_recovery_key
from ciuic.repository.disk import Disk, open_regular
from ciuic.system.child_process import program_environment
from ciuic.system.poll import readable

SlotKind = Literal["passphrase", "key-file", "command", "recovery"]
KEY_BYTES: Final = 32
MAX_PASSPHRASE_BYTES: Final = 4096
# A key as text takes 64 characters and a line end.
MAX_KEY_TEXT_BYTES: Final = 4096
DEFAULT_COMMAND_TIMEOUT_SECONDS: Final = 60.0
"""Limit for a command such as one that asks a key management service; these answer within seconds."""


class SlotSecret:
    """Secret and the kind of slot that it opens. It appears in no repr and no pickle."""

    __slots__ = ("_secret", "kind")

    def __init__(self, kind: SlotKind, secret: bytes) -> None:
        self.kind: Final[SlotKind] = kind
        self._secret = secret

    def reveal(self) -> bytes:
        """Return the secret bytes, for the derivation of a slot's key."""
        return self._secret

    def __repr__(self) -> str:
        return f"SlotSecret({self.kind!r}, <secret>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")


def passphrase_secret(passphrase: str) -> SlotSecret:
    """Return the secret of a passphrase: UTF-8 of its NFC, so that it does not depend on the keyboard.

    Raises:
        UsageError: it is empty, too long or not text.
    """
    try:
        secret = unicodedata.normalize("NFC", passphrase).encode()
    except UnicodeEncodeError:
        raise UsageError("the passphrase is not valid text") from None
    if not 0 < len(secret) <= MAX_PASSPHRASE_BYTES:
        raise UsageError(f"a passphrase must have 1 to {MAX_PASSPHRASE_BYTES} bytes, got {len(secret)}")
    return SlotSecret("passphrase", secret)


def recovery_secret(text: str) -> SlotSecret:
    """Return the secret of a recovery key as it was typed. UsageError for a typing error."""
    return SlotSecret("recovery", parse_recovery_key(text))


def typed_secret(text: str) -> SlotSecret:
    """Return the secret that was typed: a recovery key if it looks like one, else a passphrase.

    Raises:
        UsageError: the recovery key has a typing error, or the passphrase is impossible.
    """
    return recovery_secret(text) if is_recovery_key(text) else passphrase_secret(text)


def new_key_text() -> bytes:
    """Return a new random key as a key file has it: 64 hexadecimal digits and a line end."""
    return os.urandom(KEY_BYTES).hex().encode() + b"\n"


def parse_key_text(data: bytes, source: str) -> bytes:
    """Return the 32 bytes of a key: 64 hexadecimal digits or base64, with white space around it.

    Raises:
        UsageError: it is neither; the message names ``source`` and shows nothing of the data.
    """
    text = data.strip()
    try:
        key = (
            bytes.fromhex(text.decode("ascii"))
            if len(text) == 2 * KEY_BYTES
            else base64.b64decode(text, validate=True)
        )
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"{source} must give {KEY_BYTES} bytes as 64 hexadecimal digits or base64, but does not"
        )
    return key


def read_key_file(path: str) -> SlotSecret:
    """Return the secret in a key file.

    Raises:
        NotFound: there is none.
        NotPermitted: it cannot be read, belongs to another user, or others may read or write it.
        UsageError: it has no key.
    """
    try:
        fd = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        raise NotFound(f"there is no key file {path}") from None
    except OSError as error:
        raise NotPermitted(f"cannot read the key file {path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        # Of the open descriptor, so that the file cannot be exchanged in between.
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()):
            raise NotPermitted(
                f"the key file {path} must belong to this user or root, not to uid {status.st_uid}"
            )
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(status.st_mode)
            raise NotPermitted(
                f"others may use the key file {path} (mode {mode:04o})", hint=f"chmod 0600 {path}"
            )
        data = file.read(MAX_KEY_TEXT_BYTES)
    return SlotSecret("key-file", parse_key_text(data, f"the key file {path}"))


def run_key_command(
    argv: Sequence[str], *, timeout_seconds: float = DEFAULT_COMMAND_TIMEOUT_SECONDS
) -> SlotSecret:
    """Return the secret that a command prints, as in a key file. Its standard error is that of this process.

    Args:
        argv: program (an absolute path, or a name that PATH has) and arguments; no shell is started, and the
            current directory is /.
        timeout_seconds: time after which the command and its children are killed.

    Raises:
        UsageError: the command cannot be started, fails, or prints no key.
        NotPermitted: it did not end in time.
    """
    if not argv or not argv[0]:
        raise UsageError("a key command must name a program")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            env=program_environment(),
            # A group of its own, so that its children can be killed with it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot start the key command {argv[0]}: {error}") from None
    try:
        data = _output(process, argv[0], time.monotonic() + timeout_seconds)
    finally:
        _end(process)
    if process.returncode:
        raise UsageError(f"the key command {argv[0]} failed with status {process.returncode}")
    return SlotSecret("command", parse_key_text(data, f"the key command {argv[0]}"))


def _output(process: subprocess.Popen[bytes], program: str, deadline: float) -> bytes:
    """Return what the command prints until it closes its output, and wait for its end."""
    assert process.stdout is not None
    found = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not readable(process.stdout.fileno(), left):
            raise NotPermitted(f"the key command {program} did not end in time")
        block = os.read(process.stdout.fileno(), MAX_KEY_TEXT_BYTES)
        if not block:
            break
        found += block
        if len(found) > MAX_KEY_TEXT_BYTES:
            raise UsageError(f"the key command {program} must print one key, but prints more")
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise NotPermitted(f"the key command {program} did not end in time") from None
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its children unless it was seen to end; close its output."""
    # Not poll(): a command that was not waited for keeps the number of its group, which may be another's
    # afterwards, even if it ended and left children.
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def make_key_file(path: str, *, disk: Disk | None = None) -> SlotSecret:
    """Write a new random key into a file of mode 0600, and return it; durable on return.

    Args:
        path: Absolute path of the file, which must not exist.
        disk: Durable operations; None for the real disk.

    Raises:
        UsageError: there is a file already; it is never replaced, because it may hold the only key of a remote.
        NotFound: there is no such directory.
        NotPermitted: the file cannot be written.
    """
    disk = disk or Disk()
    temporary = f"{path}.{os.urandom(4).hex()}.new"
    try:
        disk.replace_file(temporary, new_key_text())
        try:
            # link(2) makes a whole file appear, or none, and never takes the place of another.
            os.link(temporary, path)
        finally:
            # Makes the new name durable as well: it is in the same directory.
            disk.remove_file(temporary)
    except FileExistsError:
        raise UsageError(
            f"there is a file {path} already, and a key is never overwritten",
            hint="name another file with --key-file, or move this one away if no remote needs it",
        ) from None
    except FileNotFoundError:
        raise NotFound(
            f"there is no directory {os.path.dirname(path)} for the key file", hint="make it first"
        ) from None
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise NotPermitted(
            f"the key file {path} cannot be written: {error.strerror}", hint="run it as root"
        ) from None
    # Read as the uploader will read it: a file that it would refuse must not be the only key.
    return read_key_file(path)
