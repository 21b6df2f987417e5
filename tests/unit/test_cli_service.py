"""`ciuic service`: what is written for systemd, and what systemctl is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.cli.systemd import UNITS, Systemd, for_program, unit_text
from ciuic.errors import CiuicError

PROGRAM = Path("/opt/venv one/bin/ciuic")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """A machine of its own: units in a directory, a systemctl that writes down what it was told."""
    monkeypatch.setattr(
        "ciuic.cli.systemd.unit_text", lambda name: f"# {name}\n[Service]\nExecStart=/usr/bin/ciuic daemon\n"
    )
    log = tmp_path / "calls"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'case $1 in show) printf "ActiveState=active\\nUnitFileState=enabled\\nMainPID=42\\nStatusText=all well\\n";; '
        "mask) echo no such unit >&2; exit 5;; esac\n"
    )
    systemctl.chmod(0o755)
    (tmp_path / "booted").mkdir()
    return Systemd(tmp_path / "units", tmp_path / "booted", str(systemctl))


def calls(system: Systemd) -> list[str]:
    return (Path(system.systemctl).parent / "calls").read_text().splitlines()


def test_install_writes_enables_and_starts(system: Systemd) -> None:
    """After install the units run this program, and systemd was told in the right order."""
    written = system.install(PROGRAM, config=None, start=True)
    assert [path.name for path in written] == list(UNITS)
    assert 'ExecStart="/opt/venv one/bin/ciuic" daemon' in written[0].read_text()
    assert calls(system) == [
        "daemon-reload",
        "enable ciuic.service ciuic-scrub.timer",
        "restart ciuic.service ciuic-scrub.timer",
    ]


def test_install_twice_is_install_once(system: Systemd) -> None:
    """Installing again leaves the same files and no temporary ones."""
    system.install(PROGRAM, config=None, start=False)
    before = {path.name: path.read_text() for path in system.unit_dir.iterdir()}
    system.install(PROGRAM, config=None, start=False)
    assert {path.name: path.read_text() for path in system.unit_dir.iterdir()} == before
    assert set(before) == set(UNITS)


def test_configuration_named_at_install_is_kept(system: Systemd) -> None:
    """`ciuic --config FILE service install` makes the service read that file; installing without it takes that back."""
    system.install(PROGRAM, config=Path("/srv/my ciuic.toml"), start=False)
    drop_ins = [
        system.unit_dir / f"{unit}.d" / "config.conf" for unit in ("ciuic.service", "ciuic-scrub.service")
    ]
    for drop_in in drop_ins:
        assert 'Environment="CIUIC_CONFIG=/srv/my ciuic.toml"' in drop_in.read_text()
    system.install(PROGRAM, config=None, start=False)
    assert not any(drop_in.exists() for drop_in in drop_ins)


def test_uninstall_removes_what_install_wrote(system: Systemd) -> None:
    """After uninstall nothing of ours is left, and a second uninstall finds nothing to do."""
    system.install(PROGRAM, config=Path("/etc/x.toml"), start=True)
    assert len(system.uninstall()) == len(UNITS) + 2
    assert list(system.unit_dir.iterdir()) == []
    assert calls(system)[-3:] == [
        "disable --now ciuic.service ciuic-scrub.timer",
        "stop ciuic-workers.socket",
        "daemon-reload",
    ]
    assert system.uninstall() == []


def test_facts_of_an_installed_service(system: Systemd) -> None:
    """What systemctl says arrives as values."""
    assert system.facts() == {
        "installed": False,
        "active": "inactive",
        "enabled": "disabled",
        "pid": None,
        "text": "",
    }
    system.install(PROGRAM, config=None, start=False)
    assert system.facts() == {
        "installed": True,
        "active": "active",
        "enabled": "enabled",
        "pid": 42,
        "text": "all well",
    }


def test_a_refusal_of_systemctl_is_told(system: Systemd) -> None:
    """When systemctl fails, its own words are the message."""
    with pytest.raises(CiuicError, match="systemctl mask failed: no such unit"):
        system.call("mask", "ciuic.service")


def test_without_systemd_it_says_so(tmp_path: Path) -> None:
    """Where systemd does not run, the command says so and what to do instead."""
    with pytest.raises(CiuicError) as caught:
        Systemd(running_mark=tmp_path / "absent").require()
    assert "systemd does not run" in caught.value.message
    assert "ciuic daemon" in caught.value.hint


def test_only_our_own_program_is_replaced() -> None:
    """Other programs that a unit runs stay as they are."""
    text = "ExecStartPre=/bin/mkdir /x\nExecStart=/usr/bin/ciuic daemon\nExecReload=/bin/kill -HUP $MAINPID\n"
    assert for_program(text, Path("/v/bin/ciuic")) == text.replace("/usr/bin/ciuic", "/v/bin/ciuic")


def test_the_shipped_units_run_this_program() -> None:
    """The unit that is shipped names its program in a form that install recognises and replaces."""
    text = for_program(unit_text("ciuic.service"), Path("/v/bin/ciuic"))
    assert "\nExecStart=/v/bin/ciuic daemon\n" in text
    assert "/usr/bin/ciuic" not in text
    assert "[Slice]" in unit_text("ciuic-capture.slice")
