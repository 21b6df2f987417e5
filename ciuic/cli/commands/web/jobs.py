"""Jobs of the processes of the page, as lines of JSON: what the front shows, and what a process of its own is asked to look at.

The front (`front_process`) asks the broker, which starts a process for each question (`look_process`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ciuic.cli.commands.web.rights import ROOT_ALONE, Admission
from ciuic.cli.shared.session import Session


class FrontJob(msgspec.Struct, kw_only=True, frozen=True):
    """Order for the process that faces browsers: the source that it shows, and the people it lets in."""

    sockets: tuple[int, ...]
    """Descriptors of the listening sockets."""
    connections: int = -1
    """Descriptor over which the broker hands connections of the Unix socket; -1 for none."""
    broker: str
    """Path of the broker's socket."""
    repository: str = ""
    """Directory of the repository; empty if a remote is read."""
    remote: str = ""
    """URL of the remote."""
    as_host: str | None = None
    config: str = ""
    trust_repository: bool = False
    verdict_key: str = ""
    """Key of the daemon's verdicts, in hexadecimal digits; empty for none."""
    checkpoint_patterns: tuple[str, ...] = ()
    """The user's patterns of what is one checkpoint."""
    host: str
    links: str = ""
    may_act: bool = False
    hosts: tuple[str, ...] = ()
    admission: Admission = ROOT_ALONE
    proxy_uid: int | None = None
    user_header: str = ""
    run_as: tuple[int, int] | None = None
    """User and group to become; None to stay."""

    def session(self) -> Session:
        """Return a new session that reads what is shown."""
        session = Session(
            config_option=Path(self.config) if self.config else None,
            repo_option=Path(self.repository) if self.repository else None,
            remote_option=self.remote or None,
            as_host=self.as_host,
            trust_option=self.trust_repository,
            ignores_environment=True,
            may_ask=False,
            verbosity=-1,
        )
        # The process may not be able to read the file.
        session.checkpoint_patterns = self.checkpoint_patterns
        return session


class CompareQuestion(msgspec.Struct, kw_only=True, frozen=True, tag="compare"):
    """Question for the difference of the contents of a path in two snapshots."""

    old: str
    """Id of the snapshot before."""
    new: str
    path: str
    """Absolute path, percent-encoded."""
    old_path: str
    """Path in the older snapshot: checkpoints have other names at other steps."""


class TensorsQuestion(msgspec.Struct, kw_only=True, frozen=True, tag="tensors"):
    """Question for the tensors in a file."""

    snapshot: str
    """Id or other name of the snapshot; empty for the newest."""
    path: str
    """Absolute path, percent-encoded."""


class TrainingQuestion(msgspec.Struct, kw_only=True, frozen=True, tag="training"):
    """Question for the numbers that trainings wrote, and the steps of the snapshots."""


class FindQuestion(msgspec.Struct, kw_only=True, frozen=True, tag="find"):
    """Question for the paths of all snapshots that match a pattern of a shell, percent-encoded."""

    pattern: str
    deleted: bool = False
    """Only what the newest snapshot does not have."""


Question = CompareQuestion | TensorsQuestion | TrainingQuestion | FindQuestion


class LookJob(msgspec.Struct, kw_only=True, frozen=True):
    """A question, and what is to be opened for it."""

    front: FrontJob
    question: Question


class TensorRow(msgspec.Struct, kw_only=True, frozen=True):
    """A tensor that differs. Numbers that JSON does not have, as an infinite relative change, are None."""

    name: str
    kind: str
    shape: str
    relative: float | None = None
    """Norm of the change by the norm before."""
    largest: float | None = None
    cosine: float | None = None
    new_nan: int = 0
    new_inf: int = 0
    times_median: float | None = None
    """Relative change by the median of all that differ."""


class Difference(msgspec.Struct, kw_only=True, frozen=True):
    """Difference of the contents of a path."""

    kind: Literal["text", "tensors"]
    lines: tuple[tuple[str, str], ...] = ()
    """(style, text) of each line of a text's difference."""
    tensors: tuple[TensorRow, ...] = ()
    """Largest changes first."""
    differing: int = 0
    """Number of tensors that differ."""
    identical: int = 0
    read_bytes: int = 0
    size_bytes: int = 0


class Tensors(msgspec.Struct, kw_only=True, frozen=True):
    """The tensors in a file."""

    lines: tuple[str, ...]
    """Their number and size, and a line for each."""


class FoundRow(msgspec.Struct, kw_only=True, frozen=True):
    """A path that was found, as the newest snapshot that has it."""

    path: str
    """Percent-encoded."""
    is_dir: bool
    size_bytes: int
    snapshot: str
    time_ns: int
    is_deleted: bool
    host: str


class FoundRows(msgspec.Struct, kw_only=True, frozen=True):
    """Paths that were found, last seen first."""

    rows: tuple[FoundRow, ...]
    count: int
    """Number of all."""
    damage: tuple[str, ...] = ()
    """Sentences about parts that could not be read."""


class NumberSeries(msgspec.Struct, kw_only=True, frozen=True):
    """A number of a training over its steps."""

    name: str
    source: str
    """File that it was read from, or whose snapshots have it."""
    points: tuple[tuple[int, float | None], ...] = ()
    """(step, number), by step; None for NaN and infinities."""
    problem: str = ""


class Mark(msgspec.Struct, kw_only=True, frozen=True):
    """A snapshot beside the numbers."""

    snapshot: str
    time_ns: int
    step: int | None
    """Step of the training at the cut, as far as it is known."""
    state: str = ""
    """Verdict on its newest checkpoint; empty if it has none."""
    checkpoint: str = ""
    """Path of that, percent-encoded."""


class TrainingNumbers(msgspec.Struct, kw_only=True, frozen=True):
    """Numbers that trainings wrote, and the snapshots, newest first."""

    series: tuple[NumberSeries, ...]
    marks: tuple[Mark, ...]
