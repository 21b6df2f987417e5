"""The unit files: valid, shipped, and without what would hide the mounts or kill the jobs' file system."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.ci import needs

from ciuic.cli.systemd import UNITS, for_program, unit_text

MOUNT_NAMESPACE_OPTIONS = [
    "PrivateTmp",
    "PrivateMounts",
    "PrivateDevices",
    "ProtectSystem",
    "ProtectHome",
    "ProtectKernelTunables",
    "ProtectKernelModules",
    "ProtectKernelLogs",
    "ProtectControlGroups",
    "ProtectProc",
    "ProtectClock",
    "ProtectHostname",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "InaccessiblePaths",
    "BindPaths",
    "TemporaryFileSystem",
    "RootDirectory",
    "RootImage",
    "DynamicUser",
    "MountFlags",
]


def settings(name: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in unit_text(name).splitlines())
    return [
        (line.partition("=")[0], line.partition("=")[2]) for line in lines if "=" in line and line[0] != "#"
    ]


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """systemd-analyze verify accepts every unit as it is installed."""
    analyze = shutil.which("systemd-analyze")
    needs("" if analyze else "systemd-analyze is not installed")
    assert analyze is not None
    for name in UNITS:
        (tmp_path / name).write_text(for_program(unit_text(name), Path("/bin/true")))
    result = subprocess.run(
        [analyze, "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in result.stderr.splitlines() if "ciuic" in line]
    assert (result.returncode, said) == (0, [])


def test_systemd_rates_the_service_no_worse_than_it_can_be(tmp_path: Path) -> None:
    """The exposure level of systemd-analyze stays below 6 of 10: what is left is what mounting for others takes."""
    analyze = shutil.which("systemd-analyze")
    needs("" if analyze else "systemd-analyze is not installed")
    assert analyze is not None
    unit = tmp_path / "ciuic.service"
    unit.write_text(for_program(unit_text("ciuic.service"), Path("/bin/true")))
    done = subprocess.run(
        [analyze, "security", "--no-pager", "--offline=true", "--threshold=60", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze rates no files")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_service_gets_no_mount_namespace_of_its_own() -> None:
    """Any of these options would mount the overlays where no job sees them."""
    used = {key for key, _ in settings("ciuic.service")}
    assert used.isdisjoint(MOUNT_NAMESPACE_OPTIONS)


def test_a_crash_of_the_daemon_leaves_the_workers_alone() -> None:
    """Only the main process is signalled, an out-of-memory kill stops nothing else, and sockets outlive a restart."""
    values = dict(settings("ciuic.service"))
    assert values["KillMode"] == "process"
    assert values["OOMPolicy"] == "continue"
    assert values["RuntimeDirectoryPreserve"] == "restart"


def test_the_workers_are_not_throttled_and_captures_are() -> None:
    """The data path has an ordinary share; the slice of captures the least one."""
    service, capture = dict(settings("ciuic.service")), dict(settings("ciuic-capture.slice"))
    assert service["IOSchedulingClass"] != "idle"
    assert int(service["CPUWeight"]) >= 100
    assert (capture["CPUWeight"], capture["IOWeight"]) == ("1", "1")


def test_the_scrub_is_last_in_line_and_goes_on_where_it_stopped() -> None:
    """A slice a night, in the slice of captures, at idle priority; a repository that is not there yet is no failure."""
    scrub, timer = dict(settings("ciuic-scrub.service")), dict(settings("ciuic-scrub.timer"))
    assert scrub["ExecStart"].endswith(" verify --checksum --max-duration 30m")
    assert (scrub["Slice"], scrub["Nice"], scrub["IOSchedulingClass"]) == (
        "ciuic-capture.slice",
        "19",
        "idle",
    )
    assert set(scrub["SuccessExitStatus"].split()) == {"3", "75"}
    assert timer["Persistent"] == "true"


def test_the_service_waits_for_readiness_and_is_watched() -> None:
    """systemd knows when the roots are mounted, and notices a hanging event loop."""
    values = dict(settings("ciuic.service"))
    assert (values["Type"], values["NotifyAccess"], values["Restart"]) == ("notify", "main", "on-failure")
    assert int(values["WatchdogSec"]) > 0
    assert int(values["FileDescriptorStoreMax"]) > 0


def test_the_example_configuration_means_the_defaults() -> None:
    """Copied as it is, the example changes nothing; every commented key is a key that exists."""
    from ciuic.config import Config, parse_config

    path = Path(__file__).parents[2] / "etc/ciuic.toml"
    text = path.read_text()
    config, default = parse_config(text, path), Config()
    assert (config.roots, config.schedule, config.retention, config.capture, config.control, config.log) == (
        default.roots,
        default.schedule,
        default.retention,
        default.capture,
        default.control,
        default.log,
    )
    lines = [
        line.removeprefix("# ") if " = " in line or line.startswith("# [[") else line
        for line in text.splitlines()
    ]
    everything = parse_config("\n".join(lines), path)
    assert everything.roots
    assert everything.min_free is not None
