"""`ciuic service`: the units written for systemd, and the calls of systemctl."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ciuic.cli.app import cli
from ciuic.cli.doctor_checks import systemd_unit
from ciuic.cli.shared.systemd import UNITS, Systemd, directories_of, for_program, unit_text
from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError

PROGRAM = Path("/opt/venv one/bin/ciuic")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """Fake a machine: units in a directory, and a systemctl that records its arguments."""
    monkeypatch.setattr(
        "ciuic.cli.shared.systemd.unit_text",
        lambda name: f"# {name}\n[Service]\nExecStart=/usr/bin/ciuic daemon\n",
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
    return Systemd(
        tmp_path / "units",
        tmp_path / "booted",
        str(systemctl),
        upload_state_dir=tmp_path / "var" / "ciuic-upload",
    )


def calls(system: Systemd) -> list[str]:
    return (Path(system.systemctl).parent / "calls").read_text().splitlines()


def test_install_writes_enables_and_starts(system: Systemd) -> None:
    """The units run this program after install, and systemctl was called in the right order."""
    written = system.install(PROGRAM, config=None, start=True)
    assert [path.name for path in written] == list(UNITS)
    assert 'ExecStart="/opt/venv one/bin/ciuic" daemon' in written[0].read_text()
    assert calls(system) == [
        "daemon-reload",
        "enable ciuic.service ciuic-scrub.timer ciuic-upload.service ciuic-drill.timer ciuic-exporter.service",
        "restart ciuic.service ciuic-scrub.timer ciuic-upload.service ciuic-drill.timer ciuic-exporter.service",
        "try-restart ciuic-web.service",
    ]


def test_state_of_an_upload_by_hand_is_handed_over(system: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ciuic remote upload` of root left is where the service's user keeps its state, also where rename(2) fails with EXDEV."""
    state = system.upload_state_dir
    (state / "nas").mkdir(parents=True)
    (state / "nas/stored").write_text("{}")

    rename = os.rename

    def refuse(source: str, target: str, **options: Any) -> None:
        if os.path.isdir(source):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    system.install(PROGRAM, config=None, start=False)
    system.install(PROGRAM, config=None, start=False)
    assert state.is_symlink()
    assert (state.parent / "private" / state.name / "nas/stored").read_text() == "{}"
    assert (state / "nas/stored").exists()
    assert state.parent.joinpath("private").stat().st_mode & 0o777 == 0o700


def test_units_may_write_to_remotes_that_are_directories(system: Systemd, tmp_path: Path) -> None:
    """The units of remotes may write to these directories as their owner, until there is no such remote; doctor tells where not."""
    place = tmp_path / "nas 1%"
    place.mkdir()
    os.chown(place, 4321, 4321)
    remotes = [
        RemoteConfig(name="nas", url=f"file://{tmp_path}/nas%201%25"), RemoteConfig(name="s3", url="s3://bucket/x")
    ]  # fmt: skip
    places = directories_of(remotes)
    assert places == [place]
    system.install(PROGRAM, config=None, start=False)
    assert [one.level for one in systemd_unit(system, daemon_answers=True, places=places)] == [
        "ok",
        "problem",
    ]
    system.install(PROGRAM, config=None, start=False, places=places)
    assert [one.level for one in systemd_unit(system, daemon_answers=True, places=places)] == ["ok"]
    for unit in ("ciuic-upload", "ciuic-drill"):
        lines = (system.unit_dir / f"{unit}.service.d/places.conf").read_text().splitlines()
        assert f'ReadWritePaths="{tmp_path}/nas 1%%"' in lines
        assert "User=4321" in lines
    assert system.has_places([])
    system.install(PROGRAM, config=None, start=False)
    assert not (system.unit_dir / "ciuic-upload.service.d/places.conf").exists()
    system.install(PROGRAM, config=None, start=False, places=places)
    system.uninstall()
    assert list(system.unit_dir.iterdir()) == []


def test_install_twice_is_install_once(system: Systemd) -> None:
    """Installing again leaves the same files and no temporary ones."""
    system.install(PROGRAM, config=None, start=False)
    before = {path.name: path.read_text() for path in system.unit_dir.iterdir()}
    system.install(PROGRAM, config=None, start=False)
    assert {path.name: path.read_text() for path in system.unit_dir.iterdir()} == before
    assert set(before) == set(UNITS)


def test_configuration_named_at_install_is_kept(system: Systemd) -> None:
    """`ciuic --config FILE service install` makes the service read FILE; install without it undoes that."""
    system.install(PROGRAM, config=Path("/srv/my ciuic.toml"), start=False)
    drop_ins = [
        system.unit_dir / f"{unit}.d" / "config.conf"
        for unit in ("ciuic.service", "ciuic-scrub.service", "ciuic-upload.service", "ciuic-exporter.service")
    ]
    for drop_in in drop_ins:
        assert 'Environment="CIUIC_CONFIG=/srv/my ciuic.toml"' in drop_in.read_text()
    system.install(PROGRAM, config=None, start=False)
    assert not any(drop_in.exists() for drop_in in drop_ins)


def test_uninstall_removes_what_install_wrote(system: Systemd) -> None:
    """Uninstall removes every file that install wrote, and a second uninstall finds nothing to do."""
    system.install(PROGRAM, config=Path("/etc/x.toml"), start=True)
    assert len(system.uninstall()) == len(UNITS) + 6
    assert list(system.unit_dir.iterdir()) == []
    assert calls(system)[-3:] == [
        "disable --now ciuic.service ciuic-scrub.timer ciuic-upload.service ciuic-drill.timer ciuic-exporter.service ciuic-web.service",
        "stop ciuic-workers.socket",
        "daemon-reload",
    ]
    assert system.uninstall() == []


def test_facts_of_an_installed_service(system: Systemd) -> None:
    """The output of systemctl show is parsed into values, for the daemon's unit and for that of the upload."""
    absent = {"installed": False, "active": "inactive", "enabled": "disabled", "pid": None, "text": ""}
    assert system.facts() == {**absent, "upload": absent}
    system.install(PROGRAM, config=None, start=False)
    present = {"installed": True, "active": "active", "enabled": "enabled", "pid": 42, "text": "all well"}
    assert system.facts() == {**present, "upload": present}
    # As after an installation by an older version.
    (system.unit_dir / "ciuic-upload.service").unlink()
    assert system.facts() == {**present, "upload": absent}


def test_failure_of_systemctl_is_printed(system: Systemd) -> None:
    """A failure of systemctl is reported in its own words."""
    with pytest.raises(CiuicError, match="systemctl mask failed: no such unit"):
        system.call("mask", "ciuic.service")


def test_without_systemd_it_says_so(tmp_path: Path) -> None:
    """The command says that there is no systemd, and what to do instead."""
    with pytest.raises(CiuicError) as caught:
        Systemd(running_mark=tmp_path / "absent").require()
    assert "systemd does not run" in caught.value.message
    assert "ciuic daemon" in caught.value.hint


def test_only_our_own_program_is_replaced() -> None:
    """Install leaves other programs that a unit runs unchanged."""
    text = "ExecStartPre=/bin/mkdir /x\nExecStart=/usr/bin/ciuic daemon\nExecReload=/bin/kill -HUP $MAINPID\n"
    assert for_program(text, Path("/v/bin/ciuic")) == text.replace("/usr/bin/ciuic", "/v/bin/ciuic")


def test_the_shipped_units_run_this_program() -> None:
    """The shipped unit names its program in a form that install recognises and replaces."""
    text = for_program(unit_text("ciuic.service"), Path("/v/bin/ciuic"))
    assert "\nExecStart=/v/bin/ciuic daemon\n" in text
    assert "/usr/bin/ciuic" not in text
    assert "[Slice]" in unit_text("ciuic-capture.slice")


@pytest.fixture
def places(system: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the command find the fake machine; return the configuration file that the service finds by itself."""
    file = tmp_path / "usual.toml"
    monkeypatch.setattr("ciuic.cli.shared.systemd.Systemd", lambda: system)
    monkeypatch.setattr("ciuic.cli.shared.systemd.this_program", lambda: PROGRAM)
    monkeypatch.delenv("CIUIC_CONFIG", raising=False)

    def find(named: Path | None, *, environ: Mapping[str, str], **_: object) -> Path:
        return named or Path(environ.get("CIUIC_CONFIG") or file)

    # The searched files are a default argument, which cannot be replaced.
    monkeypatch.setattr("ciuic.config.load.find_file", find)
    return file


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_invalid_configuration_installs_nothing(
    system: Systemd, places: Path, tmp_path: Path, named: bool, as_json: bool
) -> None:
    """Install ends with 2 before a unit is written where the service could not read its configuration."""
    wrong = tmp_path / "named.toml" if named else places
    wrong.write_text("[nonsense]\nx = 1\n")
    words = ["--config", str(wrong)] if named else []
    more = ["--json"] if as_json else []
    result = CliRunner().invoke(cli, [*words, "service", "install", *more])
    assert result.exit_code == 2, result.output
    assert not system.unit_dir.exists()
    assert not (tmp_path / "calls").exists()
    if as_json:
        assert json.loads(result.stdout)["code"] == 2


def test_install_reads_what_the_service_will_read(
    system: Systemd, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's CIUIC_CONFIG, which the service does not get, decides nothing."""
    places.write_text(f'[[root]]\npath = "{tmp_path}/data"\n')
    monkeypatch.setenv("CIUIC_CONFIG", str(tmp_path / "absent.toml"))
    result = CliRunner().invoke(cli, ["service", "install", "--no-start"])
    assert result.exit_code == 0, result.output
    assert "no root is protected" not in result.output
    assert set(UNITS) <= {path.name for path in system.unit_dir.iterdir()}


def test_status_prints_the_upload_beside_the_daemon(system: Systemd, places: Path) -> None:
    """Status has a line for each of the two services, and says what to do where the upload's unit is missing."""
    system.install(PROGRAM, config=None, start=False)
    result = CliRunner().invoke(cli, ["service", "status"])
    assert result.stdout.count("active, enabled, pid 42") == 2
    assert "ciuic-upload.service: active" in result.stdout
    (system.unit_dir / "ciuic-upload.service").unlink()
    result = CliRunner().invoke(cli, ["service", "status"])
    assert "ciuic-upload.service is not installed; ciuic service install" in result.stderr


@pytest.mark.parametrize("reachable", [True, False])
def test_install_warns_of_a_program_that_the_upload_cannot_reach(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    """With a remote, install warns where the program lies in a directory that the upload's user cannot enter."""
    place = Path("/usr/bin/env") if reachable else tmp_path / "closed" / "ciuic"
    if not reachable:
        place.parent.mkdir(mode=0o700)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    monkeypatch.setattr("ciuic.cli.shared.systemd.this_program", lambda: place)
    # The interpreter of the tests may lie in anybody's home.
    monkeypatch.setattr("sys.executable", "/usr/bin/env")
    places.write_text('[remote]\nurl = "s3://bucket"\n')
    result = CliRunner().invoke(cli, ["service", "install", "--no-start"])
    assert result.exit_code == 0, result.output
    assert ("ciuic-upload.service cannot run" in result.stderr) is not reachable
