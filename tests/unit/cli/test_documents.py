"""Tests of the objects of ``--json``: how they are made from records, and what the page says of them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.times import rfc3339

CHECKOUT = Path(__file__).parents[3]
_MODULES = [path for path in (CHECKOUT / "ciuic/cli").rglob("*.py") if "Keys" in path.read_text()]


class _Part(NamedTuple):
    path: bytes
    reason: str = ""


class _Record(NamedTuple):
    time_ns: int
    mode: int
    roots: tuple[bytes, ...]
    parts: tuple[_Part, ...]
    parent: str = ""
    ratio: float | None = float("inf")


_RECORD = _Record(10**9, 0o100640, (b"/a", b"/\xff"), (_Part(b"/p", "torn"),))


def test_values_are_as_json_has_them() -> None:
    """Times, modes, names that are not UTF-8, and numbers that JSON does not have."""
    keys = Keys("time, time_ns, mode, roots (each path), ratio, file", "")
    assert keys.of(_RECORD, file=Path("/f")) == {
        "time": rfc3339(10**9),
        "time_ns": 10**9,
        "mode": "0640",
        "roots": [{"path": "/a"}, {"path": "/\\xff", "path_base64": "L/8="}],
        "ratio": None,
        "file": "/f",
    }


def test_keys_stand_in_their_order_and_values_come_before_records() -> None:
    """A value of the caller replaces that of a record; the first record that has one wins."""
    document = Keys("reason, path, parent").of(
        _Part(b"/1", "one"), _Part(b"/2", "two"), parent="x", path=b"/3"
    )
    assert list(document.items()) == [("reason", "one"), ("path", "/3"), ("parent", "x")]


def test_keys_without_a_value() -> None:
    """``?`` leaves a key out, ``|null`` makes it null, and any other must have a value."""
    assert Keys("target?, parent|null, taken|null").of(_RECORD, target=b"", taken_ns=0) == {
        "parent": None,
        "taken": None,
    }
    # An empty text is a value.
    assert Keys("parent?").of(_RECORD) == {"parent": ""}
    with pytest.raises(AttributeError, match="absent"):
        Keys("absent").of(_RECORD)


def test_objects_below_a_key() -> None:
    """Records below a key become objects of its keys; None stays null, and an object that is made already stays."""
    keys = Keys("parts, part (or null), made", parts=Keys("reason"), part=Keys("reason"), made=Keys("reason"))
    assert keys.of(_RECORD, part=_Part(b"/q", "gone"), made=[{"other": 1}]) == {
        "parts": [{"reason": "torn"}],
        "part": {"reason": "gone"},
        "made": [{"other": 1}],
    }
    assert keys.of(_RECORD, part=None, made=[])["part"] is None


def test_the_page_has_keys_notes_and_inner_keys() -> None:
    """Notes may have commas and parentheses."""
    keys = Keys("id, parent|null (of (an) id, or null), parts, size? (of `a`)", parts=Keys("path, reason"))
    assert keys.markdown() == (
        "`id`, `parent` or null (of (an) id, or null), `parts` {`path`, `reason`}, `size` (of `a`)"
    )


def _called(tree: ast.Module, keys: dict[str, Keys]) -> Iterator[tuple[str, str]]:
    """Yield the name of a table and each value that a call of its ``of`` names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "of":
            of = node.func.value
            if isinstance(of, ast.Name) and of.id in keys:
                yield from ((of.id, keyword.arg) for keyword in node.keywords if keyword.arg)


@pytest.mark.parametrize("path", sorted(_MODULES), ids=str)
def test_no_command_gives_a_value_that_no_key_takes(path: Path) -> None:
    """A misspelled value would be dropped without a word."""
    module = importlib.import_module(".".join(path.relative_to(CHECKOUT).with_suffix("").parts))
    keys = {name: value for name, value in vars(module).items() if isinstance(value, Keys)}
    for table, value in _called(ast.parse(path.read_text()), keys):
        names = re.findall(r"\w+", re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", keys[table].text))
        assert value.removesuffix("_ns") in names or value in names, (table, value)
