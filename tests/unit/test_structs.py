"""Decoders of msgspec are made in one place, because their first use by two threads at once ends the process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ciuic
from ciuic.structs import decode_json, decode_msgpack

PACKAGE = Path(ciuic.__file__).parent
_MAKERS = {
    "msgspec.json.Decoder",
    "msgspec.msgpack.Decoder",
    "msgspec.json.decode",
    "msgspec.msgpack.decode",
    "msgspec.convert",
}
_AT_ONCE = """
import sys, threading
sys.setswitchinterval(1e-6)
from ciuic.repository.snapshot_format import StoredSnapshot
from ciuic.structs import decode_msgpack
start = threading.Barrier(8)
def decode():
    start.wait()
    try:
        decode_msgpack(b"\\x80", StoredSnapshot)
    except ValueError:
        pass
threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_no_other_module_makes_decoders() -> None:
    """Every decoder of a type comes from `ciuic.structs`."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "structs.py" and path.parent == PACKAGE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKERS:
                # Without a type only builtins are decoded.
                typed = len(node.args) > 1 or node.keywords or not ast.unparse(node.func).endswith("decode")
                if typed:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found


def test_first_uses_at_once() -> None:
    """Eight threads that decode the first snapshot of a process at the same moment end with it alive."""
    for _ in range(10):
        subprocess.run([sys.executable, "-c", _AT_ONCE], check=True, timeout=60)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xa1\xff", b"\x91" * 100_000])
def test_whatever_is_malformed_is_one_error(data: bytes) -> None:
    """Truncated, undecodable and endlessly nested documents raise msgspec.DecodeError, and nothing else."""
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(data, Any)
    with pytest.raises(msgspec.DecodeError):
        decode_json(b'"' + data + b'"' if len(data) < 10 else b"[" * len(data), dict[str, str])
