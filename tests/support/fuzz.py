"""Fuzz target that reaches every decoder, and its initial corpus (tests/torture/fuzz.py).

The first byte chooses the decoder, the rest is its input. As a program it is the fuzzer's process:
``[FUZZ_TARGET=NAME] python -m support.fuzz CORPUS [libFuzzer's options]``. With a target (the name of a
reader) the whole input is for that decoder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.readers import Reader

REGRESSIONS = sorted((Path(__file__).parents[1] / "property" / "regressions").glob("*.bin"))
"""Kept inputs: the decoder's name, a newline, its input.

A new one is a file of that folder with a telling name.
"""
_GOLDEN = Path(__file__).parents[1] / "format"


def replay(path: Path) -> None:
    """Replay one of the kept inputs."""
    fuzzed(_as_input(path))


def _as_input(path: Path) -> bytes:
    from support.readers import readers

    name, _, data = path.read_bytes().partition(b"\n")
    return bytes([[reader.name for reader in readers()].index(name.decode())]) + data


def to_keep(data: bytes) -> bytes:
    """Return the file of ``REGRESSIONS`` for an input that the fuzzer found."""
    from support.readers import readers

    all_readers = readers()
    return all_readers[data[0] % len(all_readers)].name.encode() + b"\n" + data[1:]


def fuzzed(data: bytes) -> None:
    """Decode one input; raise everything but a value or a refusal."""
    from support.readers import readers, refused_or_read

    global _readers
    if _readers is None:
        _readers = readers()
    if data:
        refused_or_read(_readers[data[0] % len(_readers)], data[1:])


_readers: list | None = None  # type: ignore[type-arg]


def _read(reader: Reader, data: bytes) -> None:
    """Have one decoder read or refuse the bytes."""
    from support.readers import refused_or_read

    refused_or_read(reader, data)


def target(name: str) -> Callable[[bytes], None]:
    """Return the function that feeds this decoder; raise ValueError for a name without a reader."""
    from support.readers import readers

    for reader in readers():
        if reader.name == name:
            chosen = reader
            return partial(_read, chosen)
    raise ValueError(f"there is no reader named {name!r}")


def fill(corpus: Path, only: str = "") -> int:
    """Fill the corpus with valid inputs, with the golden repositories, and with earlier finds.

    ``only``: inputs of this decoder, without the byte that chooses it.
    """
    from support.readers import readers

    number = {reader.name: at for at, reader in enumerate(readers())}
    seeds = [bytes([number[reader.name]]) + reader.valid for reader in readers()]
    for golden in _GOLDEN.glob("golden-[0-9]"):
        seeds += [bytes([number[name]]) + data for name, data in _of_repository(golden)]
    seeds += map(_as_input, REGRESSIONS)
    if only:
        seeds = [seed[1:] for seed in seeds if seed[0] == number[only]]
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    return len(seeds)


def _of_repository(path: Path) -> list[tuple[str, bytes]]:
    """Return (decoder, bytes) of every structure in the repository."""
    from ciuic.repository import Repository
    from ciuic.repository import pack_format as pf

    found = [("config", (path / "config").read_bytes())]
    for snapshot in (path / "snapshots").iterdir():
        found += [("snapshot", snapshot.read_bytes()), ("snapshot payload", snapshot.read_bytes()[36:])]
    found += [("marks payload", marks.read_bytes()[36:]) for marks in (path / "marks").iterdir()]
    with Repository.open(path) as repository:
        for pack in repository.packs():
            data = (path / "packs" / f"{pack.number:016x}.pack").read_bytes()
            found.append(("pack header", data[: pf.ALIGN_BYTES]))
            at = pf.ALIGN_BYTES
            while (head := pf.decode_segment_head(data[at:], at)) is not None:
                table = data[at : at + head.table_bytes]
                found += [("segment table", table), ("segment table payload", table[:-8])]
                at = pf.align(at + head.table_bytes + head.payload_bytes)
            records = list(repository.pack_records(pack.number))
            found.append(("footer payload", b"".join(map(pf.encode_record, records[:20]))))
            for record in records:
                content = repository.chunks.get(record.id)
                if record.flags:
                    stored = data[record.offset : record.offset + record.stored_bytes]
                    found.append(("compressed chunk", stored[:4096]))
                if len(content) < 4096:
                    names = {b"CTd": ("tree leaf", "tree node"), b"CTl": ("link table",)}
                    found += [(name, content) for name in names.get(content[:3], ("attributes", "block map"))]
    return found


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["ciuic"]):
        import support.readers

        # Imports the readers of all kinds: without edges the fuzzer would search blindly.
        support.readers.readers()
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    name = os.environ.get("FUZZ_TARGET", "")
    atheris.Setup(sys.argv, target(name) if name else fuzzed)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("TMPDIR", "/dev/shm")
    main()
