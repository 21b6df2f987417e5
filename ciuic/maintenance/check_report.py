"""Result of a check: findings with their severity, and the summary in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ciuic.types import ChunkId
from ciuic.units import human_size, plural

Kind = Literal[
    "configuration",
    "snapshot",
    "index",
    "structure",
    "missing chunk",
    "pack",
    "damaged chunk",
    "orphaned pack",
    "key slot",
    "log",
    "round",
]
Severity = Literal["error", "warning", "info"]


@dataclass
class CheckFinding:
    """A problem that a check found."""

    severity: Severity
    kind: Kind
    message: str
    hint: str = ""
    snapshot: str = ""
    """A snapshot that the problem concerns; there may be more."""
    chunk: ChunkId | None = None
    repaired: bool = False


@dataclass
class CheckReport:
    """Result of a check: the findings, and how much was read."""

    findings: list[CheckFinding] = field(default_factory=list)
    snapshots: int = 0
    packs: int = 0
    stored_bytes: int = 0
    orphaned_bytes: int = 0
    """Size of packs that nothing refers to; `ciuic prune` frees them."""
    garbage_bytes: int = 0
    """Size of stored chunks that nothing refers to, in any pack."""
    data_read: bool = False
    """True if every byte of every pack was read."""

    @property
    def damaged(self) -> bool:
        """True if an error remains: exit code 4."""
        return any(finding.severity == "error" and not finding.repaired for finding in self.findings)


def summary(report: CheckReport) -> str:
    """Return the report in one sentence."""
    errors = sum(finding.severity == "error" and not finding.repaired for finding in report.findings)
    repaired = sum(finding.repaired for finding in report.findings)
    looked = f"{plural(report.snapshots, 'snapshot')}, {plural(report.packs, 'pack')}, {human_size(report.stored_bytes)}"
    if errors:
        return f"{looked}: {plural(errors, 'error')}" + (f", {repaired} repaired" if repaired else "")
    verdict = f"{repaired} repaired" if repaired else "in order"
    if not report.data_read:
        verdict += "; the content of the packs was not read (`ciuic check --read-data` reads it)"
    return f"{looked}: {verdict}"
