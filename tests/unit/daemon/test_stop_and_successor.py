"""Tests of a daemon that has just begun, and of what one that ends leaves to its successor in the runtime directory."""

from __future__ import annotations

import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from ciuic.config import load_config
from ciuic.daemon import service
from ciuic.daemon.base.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.service import Daemon, status_document
from ciuic.errors import CiuicError
from ciuic.system.sd_daemon import Notifier

RECORD = PendingRecord(id="cs-1", time_ns=1, cuts=[CutRecord(path="/a", session="s", epoch=3)])


class _Root:
    """Supervisor of a root, which can be unmounted or not."""

    worker = None
    state = "mounted"

    def __init__(self, *, unmounts: bool) -> None:
        self._unmounts = unmounts

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.state = "unmounted" if self._unmounts else "stopping"

    async def leave(self) -> None:
        await trio.lowlevel.checkpoint()


class _Pairing:
    async def serve(
        self, stopped: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None]
    ) -> None:
        task_status.started()
        await stopped()


def _left_behind(runtime: RuntimeDirectory) -> None:
    """Make the files of a daemon that was killed."""
    runtime.path.mkdir()
    runtime.write_untrusted({"/a"})
    runtime.write_pending([RECORD])


def _daemon(top: Path, *, control: str = "") -> Daemon:
    (top / "config.toml").write_text(
        textwrap.dedent(f"""\
            [repository]
            path = "{top}/repository"
            [daemon]
            runtime_dir = "{top}/run"
            [control]
            socket = "{top}/run/control.sock"
            {control}
            """)
    )
    config = load_config(top / "config.toml")
    return Daemon(config, load=lambda: config, notifier=Notifier(), now_ns=lambda: 10**18)


@pytest.mark.parametrize(
    ("restarts", "root", "keeps_list", "keeps_journal"),
    [
        pytest.param(True, _Root(unmounts=True), True, True, id="a restart leaves the roots mounted"),
        pytest.param(False, _Root(unmounts=True), False, False, id="a stop unmounts them"),
        pytest.param(False, _Root(unmounts=False), True, False, id="a root cannot be unmounted"),
        pytest.param(False, None, True, True, id="the roots were not taken over yet"),
        pytest.param(True, None, True, True, id="a restart while the roots are not taken over yet"),
    ],
)
def test_the_list_of_gaps_stays_as_long_as_the_sessions(
    monkeypatch: pytest.MonkeyPatch,
    short_tmp: Path,
    restarts: bool,
    root: _Root | None,
    keeps_list: bool,
    keeps_journal: bool,
) -> None:
    """A successor that goes on with sessions finds which of them have a gap; after a clean stop nothing is left."""
    _left_behind(RuntimeDirectory(short_tmp / "run"))
    daemon = _daemon(short_tmp)

    async def is_restarting() -> bool:
        await trio.lowlevel.checkpoint()
        return restarts

    async def work(nursery: trio.Nursery, working: trio.CancelScope) -> None:
        await trio.lowlevel.checkpoint()
        if root is not None:
            daemon.parts.roots.nursery = nursery
            daemon.parts.roots.supervisors["/a"] = root  # type: ignore[assignment]
        daemon.request_stop()

    monkeypatch.setattr(service, "is_restarting", is_restarting)
    monkeypatch.setattr(daemon, "_work", work)
    monkeypatch.setattr(daemon.parts, "pairing", _Pairing())
    trio.run(daemon.main)
    successor = RuntimeDirectory(short_tmp / "run")
    assert successor.read_untrusted() == ({"/a"} if keeps_list else set())
    assert successor.read_pending() == ([RECORD] if keeps_journal else [])
    assert (short_tmp / "run").exists() is (keeps_list or keeps_journal)


def test_a_daemon_that_cannot_start_takes_nothing_from_the_next(short_tmp: Path) -> None:
    """Files of a killed daemon stay where its successor ends at once, for instance for want of a group."""
    _left_behind(RuntimeDirectory(short_tmp / "run"))
    daemon = _daemon(short_tmp, control='group = "no-such-group-of-ciuic"')
    with pytest.raises(CiuicError, match="no-such-group"):
        trio.run(daemon.main)
    successor = RuntimeDirectory(short_tmp / "run")
    assert (successor.read_untrusted(), successor.read_pending()) == ({"/a"}, [RECORD])


def test_a_daemon_that_has_just_begun_names_every_configured_root(tmp_path: Path) -> None:
    """A starting daemon lists every configured root, as a missing one would look unprotected."""
    names = ["b", "a"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "config.toml").write_text(
        textwrap.dedent(f"""\
            [repository]
            path = "{tmp_path}/repository"
            [daemon]
            runtime_dir = "{tmp_path}/run"
            """)
        + "".join(f'[[root]]\npath = "{tmp_path}/{name}"\n' for name in names)
    )
    config = load_config(tmp_path / "config.toml")
    daemon = Daemon(config, load=lambda: config, notifier=Notifier(), now_ns=lambda: 10**18)
    document = trio.run(status_document, daemon.parts)
    assert [(root.path, root.state) for root in document.roots] == [
        (str(tmp_path / name), "starting") for name in names
    ]
    assert document.seconds_since_last is None
