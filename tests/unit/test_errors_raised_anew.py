"""Tests of errors that are raised a second time: whatever the constructor of a class takes, its facts are kept."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ciuic
from ciuic.errors import CiuicError

# They need a package that the tests may not have, or import a framework.
_LEFT_OUT = re.compile(r"__main__|^ciuic\.integrations")
_VALUES = {"str": "text", "int": 7, "bool": True, "bytes": b"path", "int | None": 7}


def _classes() -> list[type[CiuicError]]:
    for module in pkgutil.walk_packages(ciuic.__path__, "ciuic."):
        if not _LEFT_OUT.search(module.name):
            importlib.import_module(module.name)

    def below(cls: type[CiuicError]) -> Iterator[type[CiuicError]]:
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    found: set[type[CiuicError]] = {CiuicError, *below(CiuicError)}
    return sorted(
        (one for one in found if one.__module__.startswith("ciuic.")), key=lambda one: one.__qualname__
    )


def _made(cls: type[CiuicError]) -> CiuicError:
    parameters = list(inspect.signature(cls).parameters.values())
    values = {one.name: _VALUES.get(str(one.annotation), b"") for one in parameters}
    positional: list[Any] = [values[one.name] for one in parameters if one.kind is not one.KEYWORD_ONLY]
    named: dict[str, Any] = {one.name: values[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY}
    return cls(*positional, **named)


def test_every_error_can_be_raised_anew() -> None:
    """The other error has class, exit code and facts of the first, and the message and hint that were given, or the same."""
    classes = _classes()
    assert len(classes) > 60
    for cls in classes:
        error = _made(cls)
        facts = {key: value for key, value in vars(error).items() if key not in ("message", "hint")}
        for other, message, hint in (
            (error.anew(), error.message, error.hint),
            (error.anew("url: " + error.message, hint="look"), "url: " + error.message, "look"),
        ):
            assert other is not error
            assert (type(other), other.exit_code, other.__traceback__) == (cls, cls.exit_code, None)
            assert (other.message, other.hint, str(other)) == (message, hint, message)
            assert {key: vars(other)[key] for key in facts} == facts


@pytest.mark.parametrize("constructed", [r"\btype\((?:self\.)?\w+\)\([^)]*\.message", r"__class__\("])
def test_no_module_makes_an_error_of_a_class_that_it_does_not_know(constructed: str) -> None:
    """Where an error is raised again nobody calls the constructor of its class."""
    top = Path(ciuic.__file__).parent
    assert not [str(path) for path in top.rglob("*.py") if re.search(constructed, path.read_text())]
