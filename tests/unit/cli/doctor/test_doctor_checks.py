"""`ciuic doctor`: each check on a fake machine, and all checks on the real one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ciuic.cli import doctor_checks as machine
from ciuic.cli import doctor_checks as places
from ciuic.cli.app import cli
from ciuic.cli.probes import Finding, Probes
from ciuic.cli.shared.systemd import Systemd
from ciuic.config import Config, MinFree, RootConfig
from ciuic.protocol.control_types import RepositoryStatus, StatusDocument
from ciuic.system import mountinfo
from ciuic.system.mountinfo import Mount

# httpcore drops a unix socket that could not connect without closing it; the collector does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)


def levels(findings: object) -> list[str]:
    return [finding.level for finding in findings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("release", "level"), [("6.8.0-45-generic", "ok"), ("5.15.0", "ok"), ("4.18.0-el8", "warning")]
)
def test_an_old_kernel_is_a_warning(release: str, level: str) -> None:
    """An old kernel is a warning."""
    assert levels(machine.kernel(release)) == [level]


def test_fuse_that_is_not_there(tmp_path: Path) -> None:
    """A missing /dev/fuse is a problem, and the remedy covers containers."""
    (finding,) = machine.fuse(tmp_path / "fuse")
    assert finding.level == "problem"
    assert "--device /dev/fuse" in finding.remedy
    (tmp_path / "fuse").write_text("")
    assert levels(machine.fuse(tmp_path / "fuse")) == ["problem"]


def test_right_to_mount_is_read_from_the_capabilities(tmp_path: Path) -> None:
    """A process without CAP_SYS_ADMIN is reported, although it may run as root."""
    (tmp_path / "status").write_text("Name:\tx\nCapEff:\t00000000a80425fb\n")
    (finding,) = machine.fuse(Path("/dev/null").resolve(), tmp_path)
    assert finding.level == "problem"
    assert "CAP_SYS_ADMIN" in finding.message


def disk(sys: Path, name: str, number: str, scheduler: str) -> None:
    (sys / "devices" / name / "queue").mkdir(parents=True)
    (sys / "devices" / name / "queue" / "scheduler").write_text(scheduler)
    (sys / "dev" / "block").mkdir(parents=True, exist_ok=True)
    (sys / "dev" / "block" / number).symlink_to(sys / "devices" / name)


def mount(device: tuple[int, int], at: bytes) -> Mount:
    return Mount(1, 0, device, b"/", at, b"rw", b"xfs", b"/dev/x", b"rw")


@pytest.mark.parametrize(
    ("scheduler", "priority", "level"),
    [
        ("[none] mq-deadline bfq", "idle", "warning"),
        ("none mq-deadline [bfq]", "idle", "ok"),
        ("none [mq-deadline] bfq", "idle", "ok"),
        ("none mq-deadline [kyber]", "best-effort:7", "warning"),
        ("[none]", "none", "ok"),
    ],
)
def test_scheduler_and_idle_class(tmp_path: Path, scheduler: str, priority: str, level: str) -> None:
    """The idle class is a warning under a scheduler that ignores it, and fine otherwise."""
    disk(tmp_path, "nvme0n1", "259:0", scheduler)
    found = machine.schedulers([Path("/data")], [mount((259, 0), b"/data")], priority, tmp_path)
    assert levels(found) == [level]


def test_scheduler_of_partitions_and_mapped_devices(tmp_path: Path) -> None:
    """A partition has its disk's scheduler, and a mapped device those of its disks, each named once."""
    disk(tmp_path, "sda", "8:0", "[none]")
    (tmp_path / "devices" / "sda" / "sda1").mkdir()
    (tmp_path / "dev" / "block" / "8:1").symlink_to(tmp_path / "devices" / "sda" / "sda1")
    mapped = tmp_path / "devices" / "dm-0"
    (mapped / "slaves").mkdir(parents=True)
    (mapped / "slaves" / "sda1").symlink_to(tmp_path / "devices" / "sda" / "sda1")
    (tmp_path / "dev" / "block" / "253:0").symlink_to(mapped)
    mounts = [mount((8, 1), b"/data"), mount((253, 0), b"/lvm")]
    found = list(machine.schedulers([Path("/data"), Path("/lvm")], mounts, "idle", tmp_path))
    assert len(found) == 1
    assert found[0].message.startswith("sda:")


def test_a_kernel_without_pressure_figures_is_a_warning(tmp_path: Path) -> None:
    """The pressure figure is shown; a kernel without it is a warning."""
    assert levels(machine.pressure(tmp_path)) == ["warning"]
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "io").write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n")
    (finding,) = machine.pressure(tmp_path)
    assert "12.50 %" in finding.message


def test_service_without_systemd(tmp_path: Path) -> None:
    """A running daemon is fine without systemd, and no daemon means that one must be started."""
    absent = Systemd(running_mark=tmp_path / "absent")
    assert levels(machine.systemd_unit(absent, daemon_answers=True)) == ["ok"]
    assert levels(machine.systemd_unit(absent, daemon_answers=False)) == ["warning"]


def test_clone_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    """Sharing of extents is tested by doing it, with files that have no name."""
    assert places.can_clone(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []


def coverage(path: Path, config: Config) -> Finding:
    (finding,) = places.coverage([os.fsencode(path)], config)
    return finding


def test_coverage_of_paths(tmp_path: Path) -> None:
    """A path is reported as covered, excluded, missing or outside."""
    top = tmp_path / "root"
    (top / "data").mkdir(parents=True)
    (top / "cache").mkdir()
    config = Config(roots=(RootConfig(top),), exclude=("cache/",))
    assert coverage(top, config).level == "ok"
    assert coverage(top / "data", config).level == "ok"
    assert "excluded" in coverage(top / "cache", config).message
    assert coverage(top / "absent", config).level == "warning"
    assert coverage(tmp_path, config).level == "problem"


def test_coverage_sees_another_file_system(tmp_path: Path) -> None:
    """A file system mounted below a root is reported as served but not captured."""
    config = Config(roots=(RootConfig(Path("/dev")),))
    assert os.stat("/dev/pts").st_dev != os.stat("/dev").st_dev
    assert "another file system" in coverage(Path("/dev/pts"), config).message


def test_less_free_space_than_min_free_is_a_warning(tmp_path: Path) -> None:
    """Less free space than min_free is a warning."""
    config = Config()
    before, _ = places.space(config, tmp_path, mountinfo.read())
    wanted = replace(config, min_free=MinFree(size_bytes=1 << 60))
    after, _ = places.space(wanted, tmp_path, mountinfo.read())
    assert after.level in ("warning", "problem")
    assert before.message.split(":")[0] == after.message.split(":")[0]


def test_reserve_is_shown(tmp_path: Path) -> None:
    """The reserve is named, and is a problem with a remedy where less is free."""
    *_, usual = places.space(Config(), tmp_path, mountinfo.read())
    assert "free for others (5% of" in usual.message
    config = replace(Config(), repository=replace(Config().repository, reserve=MinFree(size_bytes=1 << 60)))
    *_, short = places.space(config, tmp_path, mountinfo.read())
    assert short.level == "problem"
    assert "[repository] reserve" in short.remedy


def test_only_the_disk_of_the_repository_is_measured(tmp_path: Path) -> None:
    """An absent disk is not measured at its mount point, a link is followed, and another daemon's reserve is not taken."""
    measured = list(places.space(Config(), tmp_path, mountinfo.read(), absent="its disk is not mounted"))
    assert [(finding.check, finding.level) for finding in measured] == [("reserve", "warning")]
    assert "not mounted" in measured[0].message
    (tmp_path / "link").symlink_to("/dev/shm/not-made-yet")
    free, _ = places.space(Config(), tmp_path / "link", mountinfo.read())
    assert free.message.startswith("/dev/shm: ")
    status = StatusDocument(
        version="",
        pid=1,
        since="",
        now="",
        repository=RepositoryStatus(
            path="/elsewhere", reserve_bytes=1 << 60, reserve_reason="of another disk"
        ),
    )
    *_, reserve = places.space(Config(), tmp_path, mountinfo.read(), status)
    assert "5% of" in reserve.message


def test_root_that_is_not_mounted(tmp_path: Path) -> None:
    """A configured root without our mount is a problem, as nothing tracks it."""
    config = Config(roots=(RootConfig(tmp_path),))
    assert levels(places.roots(config, mountinfo.read(), look_for_bypass=False)) == ["problem"]


def test_directory_that_fails_does_not_answer(tmp_path: Path) -> None:
    """A path that can be examined counts as answering, and one that fails does not."""
    assert Probes().answers(tmp_path)
    assert not Probes().answers(tmp_path / "absent")


def test_every_finding_of_a_full_run_has_a_remedy(tmp_path: Path) -> None:
    """Every warning and problem of a run of all checks has a remedy, and problems make the exit code 1."""
    file = tmp_path / "c.toml"
    file.write_text(f'[repository]\npath = "{tmp_path}/repo"\n[control]\nsocket = "{tmp_path}/s"\n')
    result = CliRunner().invoke(cli, ["--config", str(file), "doctor", "--json", str(tmp_path)])
    document = json.loads(result.stdout)
    assert result.exit_code == (1 if document["problems"] else 0)
    assert document["problems"] > 0
    checks = {finding["check"] for finding in document["findings"]}
    assert {
        "kernel",
        "fuse",
        "driver",
        "daemon",
        "service",
        "roots",
        "repository",
        "free space",
        "clock",
        "coverage",
    } <= checks
    for finding in document["findings"]:
        assert finding["level"] == "ok" or finding["remedy"]
    text = CliRunner().invoke(cli, ["--config", str(file), "doctor"]).stdout
    assert "problem" in text
    assert "→" in text
