"""Tests of the status document while parts of the daemon are missing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import trio

from ciuic.config import load_config
from ciuic.daemon.service import Daemon, status_document
from ciuic.system.sd_daemon import Notifier


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
