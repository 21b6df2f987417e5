"""Incidents of which the overview warns."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("jinja2")

from ciuic.cli.commands.web.front import _open_incidents
from ciuic.protocol.control_types import Incident, StatusDocument, TrainerStatus, rfc3339

_NOW_NS = time.time_ns()


def _at(seconds: float) -> str:
    return rfc3339(_NOW_NS + int(seconds * 10**9))


def _incident(kind: str, seconds: float, name: str = "run", where: str = "/work") -> Incident:
    return Incident(kind=kind, time=_at(seconds), trainer=TrainerStatus(name=name, where=where))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "started", "open_"),
    [
        (["died"], None, ["died"]),
        (["died"], -20, ["died"]),
        (["died"], -5, []),
        (["hung"], -20, ["hung"]),
        (["recovered", "hung"], -20, []),
        (["hung", "recovered", "hung"], -20, ["hung"]),
        (["died", "hung"], None, ["died"]),
        (["died", "failed"], -20, ["died", "failed"]),
    ],
)
def test_what_goes_on_is_no_incident(kinds: list[str], started: float | None, open_: list[str]) -> None:
    """A training that goes on, or was started again since, is warned of no more; ranks that outlive another one settle nothing."""
    status = StatusDocument(
        version="1",
        pid=1,
        since=_at(-100),
        now=_at(0),
        # Newest first.
        incidents=[_incident(kind, -10 - at) for at, kind in enumerate(kinds)]
        + [_incident("died", -30, "run-2"), _incident("died", -90_000, "run-3")],
        trainers=[] if started is None else [TrainerStatus(name="run", where="/work", since=_at(started))],
    )
    assert [(one.trainer.name, one.kind) for one in _open_incidents(status)] == [
        *(("run", kind) for kind in open_),
        ("run-2", "died"),
    ]
