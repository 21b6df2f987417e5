"""Key slots: the master key, wrapped by a secret (a passphrase, a key file, the output of a command or a recovery key).

Guarantees: a slot from a hostile bucket cannot make a reader allocate more than 1 GiB or compute for more
than about ten seconds, and is refused if a passphrase would be guessed too cheaply. Any number of slots cost a
passphrase about a minute, and only derivations that are made count. A slot that decayed is told apart from a wrong
passphrase by its check. A key file that others may read is refused, and a new one has mode 0600; a command is started
without a shell, with a time limit, and nothing that it prints appears in a message.

A recovery key is 32 random bytes that a person can write down and type again: ``ciuic-`` and 14 groups of 4 characters of
Crockford's base32, of the bytes and their CRC-24.

References:
    docs/remote-format.md, section 4; argon2id: RFC 9106
    https://www.crockford.com/base32.html; CRC-24: RFC 9580, section 6.1
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import signal
import stat
import subprocess
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Final, Literal, NoReturn

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ciuic.errors import NotFound, NotPermitted, UsageError
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.sealing.passphrase_key import KEY_BYTES, Argon2Cost, derive_key
from ciuic.remote.sealing.sealer import MasterKey, add_check, hkdf, split_check, xxh3_check
from ciuic.repository.errors import UnsupportedFormat
from ciuic.structs import convert, decode_json
from ciuic.system.child_process import program_environment
from ciuic.system.disk import Disk, open_regular
from ciuic.system.poll import readable

RECOVERY_KEY_BYTES: Final = 32
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_GROUP_CHARACTERS: Final = 4
_CHARACTERS: Final = 56
_BITS: Final = 5
_PREFIX: Final = "CIUIC"
# What people read in place of the characters that the alphabet has.
_MISREAD: Final = str.maketrans("ILO", "110")
_CRC_BYTES: Final = 3
_CRC_START: Final = 0xB704CE
_CRC_POLYNOMIAL: Final = 0x1864CFB


def show_recovery_key(secret: bytes) -> str:
    """Return the key as a person writes it down."""
    if len(secret) != RECOVERY_KEY_BYTES:
        raise ValueError(f"a recovery key must have {RECOVERY_KEY_BYTES} bytes, got {len(secret)}")
    number = int.from_bytes(secret + _crc24(secret).to_bytes(_CRC_BYTES, "big"), "big")
    text = "".join(_ALPHABET[number >> _BITS * at & 31] for at in reversed(range(_CHARACTERS)))
    groups = [text[at : at + _GROUP_CHARACTERS] for at in range(0, _CHARACTERS, _GROUP_CHARACTERS)]
    return "-".join(["ciuic", *groups])


def is_recovery_key(text: str) -> bool:
    """Return whether the typed text is meant as a recovery key, and not as a passphrase."""
    typed = "".join(character for character in text.upper() if character.isalnum())
    if typed.startswith(_PREFIX):
        return len(typed) > _CHARACTERS // 2
    typed = typed.translate(_MISREAD)
    is_possible = len(typed) == _CHARACTERS and all(character in _ALPHABET for character in typed)
    return is_possible and _checked([_ALPHABET.index(character) for character in typed]) is not None


def parse_recovery_key(text: str) -> bytes:
    """Return the 32 bytes of a key that was typed.

    Case, spaces and hyphens do not matter; I and L are read as 1, O as 0. Messages show no part of the key.

    Raises:
        UsageError: it is none, or has a typing error.
    """
    typed = "".join(character for character in text.upper() if not character.isspace() and character != "-")
    # No key begins so: U is not in the alphabet.
    typed = typed.removeprefix(_PREFIX).translate(_MISREAD)
    for at, character in enumerate(typed):
        if character not in _ALPHABET:
            raise UsageError(
                f"a recovery key has no such character as the one in group {_group(at)}",
                hint="it has the digits, and the letters without U; I and L are read as 1, O as 0",
            )
    if len(typed) != _CHARACTERS:
        raise UsageError(
            f"a recovery key must have {_CHARACTERS} characters, got {len(typed)}",
            hint=f"{_CHARACTERS // _GROUP_CHARACTERS} groups of {_GROUP_CHARACTERS}; spaces, hyphens and case do not matter",
        )
    values = [_ALPHABET.index(character) for character in typed]
    secret = _checked(values)
    if secret is None:
        raise UsageError("the recovery key has a typing error", hint=_where(values))
    return secret


def _group(at: int) -> int:
    return at // _GROUP_CHARACTERS + 1


def _checked(values: list[int]) -> bytes | None:
    """Return the key if its CRC fits."""
    number = 0
    for value in values:
        number = number << _BITS | value
    data = number.to_bytes(RECOVERY_KEY_BYTES + _CRC_BYTES, "big")
    secret = data[:RECOVERY_KEY_BYTES]
    return secret if _crc24(secret) == int.from_bytes(data[RECOVERY_KEY_BYTES:], "big") else None


def _where(values: list[int]) -> str:
    """Return in which group the error is, if one wrong character explains it."""
    # 1736 candidates, of which one in 16 million would fit by chance.
    for at in range(_CHARACTERS):
        for value in range(1 << _BITS):
            if _checked([*values[:at], value, *values[at + 1 :]]) is not None:
                return f"look at group {_group(at)} of {_CHARACTERS // _GROUP_CHARACTERS}"
    return "compare every group with what was written down"


def _crc24(data: bytes) -> int:
    crc = _CRC_START
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= _CRC_POLYNOMIAL
    return crc


SlotKind = Literal["passphrase", "key-file", "command", "recovery"]

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


SLOT_VERSION: Final = 1
MAX_SLOT_BYTES: Final = 8192
MAX_PASSPHRASE_WORK_KIB: Final = 48 << 20
"""Limit of memory times passes that a passphrase is tried with, in all slots together: 64 slots of the default cost, about a minute."""
_WORDS: Final[dict[SlotKind, str]] = {
    "recovery": "recovery key",
    "key-file": "key file",
    "passphrase": "passphrase",
    "command": "key command",
}
_WAYS: Final[dict[SlotKind, str]] = {
    "recovery": "its recovery key opens it: CIUIC_REMOTE_RECOVERY_KEY=ciuic-…",
    "key-file": "the key file of a host opens it: CIUIC_REMOTE_KEY_FILE=PATH, or key_file under [remote]",
    "passphrase": "a passphrase opens it: CIUIC_REMOTE_PASSPHRASE",
    "command": "what a command prints opens it: key_command under [remote]",
}
MIN_MEMORY_KIB: Final = 19 << 10
"""Floor of OWASP's Password Storage Cheat Sheet for argon2id."""
MAX_MEMORY_KIB: Final = 1 << 20
MAX_PASSES: Final = 64
MAX_LANES: Final = 16
MAX_WORK_KIB: Final = 8 << 20
"""Limit of memory times passes: about ten seconds."""
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_INFO: Final = b"ciuic key slot v1"
_NAME_INFO: Final = b"ciuic key slot name v1 "
_NAME_BYTES: Final = 6
_OWN_NAME: Final = re.compile(r"host(?:-[a-z0-9-]{1,14})?-([0-9a-f]{12})\Z")
_NOT_SLOT: Final = re.compile("[^a-z0-9-]+")
_MAX_HOST_CHARACTERS: Final = 14
_MAX_NAMES_SHOWN: Final = 8
GoesOn = Callable[[int], bool]
"""Returns whether a passphrase is tried with more slots; gets how many it was tried with."""
_Salt = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


DEFAULT_COST: Final = Argon2Cost()
"""0.8 s of a processor and 256 MiB, which RFC 9106 recommends as at least 64 MiB where memory is scarce."""


class StoredArgon2(msgspec.Struct, tag_field="name", tag="argon2id", frozen=True, kw_only=True):
    """Derivation of a slot's key from a passphrase."""

    memory_kib: Annotated[int, msgspec.Meta(ge=MIN_MEMORY_KIB, le=MAX_MEMORY_KIB)]
    passes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PASSES)]
    lanes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
    salt: _Salt


class StoredHkdf(msgspec.Struct, tag_field="name", tag="hkdf-sha256", frozen=True, kw_only=True):
    """Derivation of a slot's key from 32 random bytes."""

    salt: _Salt


class KeySlot(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``keys/<slot>``."""

    version: int
    slot: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,32}\Z")]
    kind: SlotKind
    kdf: StoredArgon2 | StoredHkdf
    wrapped: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{120}\Z")]
    """Nonce and sealed master key, in hexadecimal digits."""
    created_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def __post_init__(self) -> None:
        if (self.kind == "passphrase") is isinstance(self.kdf, StoredHkdf):
            raise ValueError(f"a slot of kind {self.kind} has another derivation")
        if isinstance(self.kdf, StoredArgon2) and self.kdf.memory_kib * self.kdf.passes > MAX_WORK_KIB:
            raise ValueError(f"memory_kib times passes must be at most {MAX_WORK_KIB}")


def wrap_master_key(
    master: MasterKey,
    remote_id: bytes,
    slot: str,
    secret: SlotSecret,
    *,
    created_ns: int,
    cost: Argon2Cost = DEFAULT_COST,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the bytes of ``keys/<slot>``.

    Args:
        master: key to wrap.
        remote_id: id of the remote, 16 bytes.
        slot: name of the slot, 1 to 32 characters of ``a-z 0-9 -``.
        secret: what opens the slot.
        created_ns: time for people, ns since 1970.
        cost: of a guess; only for a passphrase.
        random_bytes: source of salt and nonce.

    Raises:
        ValueError: name, cost or time is outside of its limits.
    """
    salt = random_bytes(_SALT_BYTES).hex()
    kdf = StoredArgon2(salt=salt, **cost._asdict()) if secret.kind == "passphrase" else StoredHkdf(salt=salt)
    nonce = random_bytes(_NONCE_BYTES)
    empty = KeySlot(
        version=SLOT_VERSION,
        slot=slot,
        kind=secret.kind,
        kdf=kdf,
        wrapped="0" * 120,
        created_ns=created_ns,
    )
    try:
        # A struct that is made does not check its fields; one that is converted does.
        convert(msgspec.to_builtins(empty), KeySlot)
    except msgspec.ValidationError as error:
        raise ValueError(f"invalid key slot: {error}") from None
    sealed = AESGCM(_slot_key(empty, secret)).encrypt(nonce, master.reveal(), _bound(remote_id, slot))
    filled = msgspec.structs.replace(empty, wrapped=(nonce + sealed).hex())
    return add_check(msgspec.json.encode(filled), xxh3_check)


def decode_slot(slot: str, data: bytes) -> KeySlot:
    """Return the content of ``keys/<slot>``.

    Raises:
        DamagedRemote: it is no slot of this name, decayed, or its derivation is outside of the limits.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    name = f"keys/{slot}"
    if len(data) > MAX_SLOT_BYTES:
        raise DamagedRemote(name, f"it has {len(data)} bytes; {MAX_SLOT_BYTES} are the limit")
    body = split_check(name, data, xxh3_check)
    try:
        version = decode_json(body, dict[str, object]).get("version")
        if version != SLOT_VERSION:
            raise UnsupportedFormat(
                f"{name} in the remote has version {version}; this ciuic reads {SLOT_VERSION}"
            )
        found = decode_json(body, KeySlot)
    except msgspec.DecodeError as error:
        raise DamagedRemote(name, str(error)) from None
    if found.slot != slot:
        raise DamagedRemote(name, f"it is the slot {found.slot}")
    return found


def unwrap_master_key(slot: KeySlot, remote_id: bytes, secret: SlotSecret) -> MasterKey:
    """Return the master key.

    A passphrase takes about a second, and as much memory as the slot says (256 MiB by default), in a child process.

    Raises:
        WrongKey: the secret does not open this slot of this remote.
        CiuicError: this installation of cryptography has no argon2id.
    """
    if secret.kind != slot.kind:
        raise WrongKey(f"the key slot {slot.slot} is opened by a {slot.kind}, not by a {secret.kind}")
    wrapped = bytes.fromhex(slot.wrapped)
    try:
        key = AESGCM(_slot_key(slot, secret)).decrypt(
            wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _bound(remote_id, slot.slot)
        )
    except InvalidTag:
        raise WrongKey(
            f"this {slot.kind} does not open the key slot {slot.slot}",
            hint="the slot itself is intact; check for another keyboard layout, or use another slot",
        ) from None
    return MasterKey(key)


def own_slot(remote_id: bytes, secret: SlotSecret, host: str) -> str:
    """Return the name of the slot that a host makes for its key: a label for people, and digits that depend on the key alone.

    Raises:
        ValueError: the secret is a passphrase, about which such a name would tell something.
    """
    label = _NOT_SLOT.sub("-", host.lower()).strip("-")[:_MAX_HOST_CHARACTERS].strip("-")
    return "-".join(filter(None, ("host", label, own_digits(remote_id, secret))))


def own_digits(remote_id: bytes, secret: SlotSecret) -> str:
    """Return the 12 digits at the end of `own_slot`."""
    if secret.kind == "passphrase":
        raise ValueError("a passphrase has no slot of its own: its name would be a cheap test of guesses")
    return hkdf(secret.reveal(), remote_id, _NAME_INFO + secret.kind.encode(), _NAME_BYTES).hex()


def digits_of(slot: str) -> str:
    """Return the digits at the end of a name that `own_slot` made; an empty text for another name."""
    found = _OWN_NAME.match(slot)
    return found[1] if found else ""


def work_kib(slot: KeySlot) -> int:
    """Return memory times passes of one derivation of the slot's key; 0 where it takes microseconds."""
    return slot.kdf.memory_kib * slot.kdf.passes if isinstance(slot.kdf, StoredArgon2) else 0


def unlock(
    slots: Iterable[KeySlot], remote_id: bytes, secret: SlotSecret, *, goes_on: GoesOn | None = None
) -> tuple[KeySlot, MasterKey]:
    """Return the first slot that the secret opens, and the master key.

    Args:
        slots: In the order in which they are tried; consumed no further than needed.
        remote_id: Id of the remote, 16 bytes.
        secret: Passphrase or key.
        goes_on: Asked each time that the slots have cost a passphrase MAX_PASSPHRASE_WORK_KIB; None for no.

    Raises:
        WrongKey: it opens none, or a passphrase none of those that it was tried with.
    """
    known: list[KeySlot] = []
    tried: list[str] = []
    spent_kib = 0
    what = _WORDS[secret.kind]
    for slot in slots:
        known.append(slot)
        if slot.kind != secret.kind:
            continue
        if spent_kib and spent_kib + work_kib(slot) > MAX_PASSPHRASE_WORK_KIB:
            if goes_on is None or not goes_on(len(tried)):
                raise WrongKey(
                    f"this {what} does not open any of the {len(tried)} key slots that it was tried with, and there are more",
                    hint="CIUIC_REMOTE_SLOT=NAME has the slot NAME tried first (ciuic remote keys list); or use a key file or recovery key, "
                    "and remove the slots that nobody of you has made (ciuic remote keys remove)",
                )
            spent_kib = 0
        spent_kib += work_kib(slot)
        try:
            return slot, unwrap_master_key(slot, remote_id, secret)
        except WrongKey:
            tried.append(slot.slot)
    if not tried:
        raise WrongKey(f"the remote has no key slot for a {what}", hint=ways_in(known))
    raise WrongKey(
        f"this {what} does not open the remote; the slots of its kind are: {shown_names(tried)}",
        hint=ways_in(known),
    )


def shown_names(names: Sequence[str]) -> str:
    """Return the names for a message, the first ones of many."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def ways_in(slots: Iterable[KeySlot]) -> str:
    """Return what opens a remote, and where to put it, for people who do not have the key that they tried."""
    kinds = {slot.kind for slot in slots}
    return "; ".join(words for kind, words in _WAYS.items() if kind in kinds)


def _slot_key(slot: KeySlot, secret: SlotSecret) -> bytes:
    """Return the key that wraps the master key."""
    salt = bytes.fromhex(slot.kdf.salt)
    if isinstance(slot.kdf, StoredHkdf):
        return hkdf(secret.reveal(), salt, _INFO)
    kdf = slot.kdf
    return derive_key(secret.reveal(), salt, Argon2Cost(kdf.memory_kib, kdf.passes, kdf.lanes))


def _bound(remote_id: bytes, slot: str) -> bytes:
    """Return the associated data of a slot."""
    return b"".join(part + b"\0" for part in (_INFO, remote_id.hex().encode(), slot.encode()))
