"""Recovery key: 32 random bytes that a person can write down and type again.

It is shown as ``ciuic-`` and 14 groups of 4 characters of Crockford's base32: the bytes and their CRC-24.

References:
    https://www.crockford.com/base32.html; CRC-24: RFC 9580, section 6.1
"""

from __future__ import annotations

from typing import Final

from ciuic.errors import UsageError

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
