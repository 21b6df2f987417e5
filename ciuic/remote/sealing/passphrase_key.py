"""Key of a passphrase by argon2id, derived in a process of its own where it takes much memory.

What argon2id takes counts as the largest memory of a process for as long as that runs, and as its share of a container's
limit: an uploader lives below 200 MiB for days, and needs 256 MiB once. The passphrase goes through a pipe, never on a command
line or into the environment.

References:
    RFC 9106
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from ciuic.errors import CiuicError, pip_install
from ciuic.system.child_process import environment, module_command

KEY_BYTES: Final = 32
# More than this is taken by a child process.
_MAX_MEMORY_KIB: Final = 64 << 10
# Limits of a slot let it take ten seconds; a machine may be busy.
_TIMEOUT_SECONDS: Final = 300


class Argon2Cost(NamedTuple):
    """Cost of one guess of a passphrase."""

    memory_kib: int = 256 << 10
    passes: int = 3
    lanes: int = 4


def derive_key(passphrase: bytes, salt: bytes, cost: Argon2Cost) -> bytes:
    """Return the key of 32 bytes that a passphrase has with this salt.

    Args:
        passphrase: UTF-8 in the normal form NFC.
        salt: 16 random bytes.
        cost: Of one guess; within limits that the caller has checked.

    Raises:
        CiuicError: this installation of cryptography has no argon2id.
    """
    if cost.memory_kib > _MAX_MEMORY_KIB and (key := _by_child(passphrase, salt, cost)) is not None:
        return key
    try:
        return _derive(passphrase, salt, cost)
    except UnsupportedAlgorithm as error:
        raise CiuicError(
            f"the package cryptography has no argon2id here: {error}",
            hint=f"install its wheel: {pip_install()}",
        ) from None


def _by_child(passphrase: bytes, salt: bytes, cost: Argon2Cost) -> bytes | None:
    """Return the key as a child process derives it; None where none can be started."""
    request = json.dumps([passphrase.hex(), salt.hex(), *cost]).encode()
    try:
        child = subprocess.run(
            module_command(__name__),
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # Anything else, such as a limit of memory, is found again and told by this process.
    if child.returncode or len(child.stdout) != KEY_BYTES:
        return None
    return child.stdout


def _derive(passphrase: bytes, salt: bytes, cost: Argon2Cost) -> bytes:
    derivation = Argon2id(
        salt=salt,
        length=KEY_BYTES,
        iterations=cost.passes,
        lanes=cost.lanes,
        memory_cost=cost.memory_kib,
    )
    return derivation.derive(passphrase)


def main() -> None:
    """Read a request from standard input and write the key to standard output, for `derive_key`."""
    passphrase, salt, *cost = json.load(sys.stdin)
    sys.stdout.buffer.write(_derive(bytes.fromhex(passphrase), bytes.fromhex(salt), Argon2Cost(*cost)))


if __name__ == "__main__":
    main()
