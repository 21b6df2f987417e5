"""Tests of which directories can be roots, and where a repository may lie beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.config import (
    AlertConfig,
    Config,
    ControlConfig,
    RepositoryConfig,
    RootConfig,
    WebConfig,
    canonical_root,
    check_overlaps,
    check_places,
    check_root,
    check_roots,
    default_repository_path,
    raise_for,
    repository_path,
)
from ciuic.errors import ConfigError, NotFound, UsageError
from ciuic.system import mountinfo
from ciuic.system.mountinfo import Mount


def mounts(*lines: str) -> list[Mount]:
    """Return a mount table of ``point type [options]`` lines over an ext4 root file system."""
    text = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    for number, line in enumerate(lines, start=2):
        point, fs_type, *options = line.split()
        text += f"{number} 1 0:{number} / {point} {''.join(options) or 'rw'} - {fs_type} none rw\n"
    return mountinfo.parse(text.encode())


def roots(*paths: str | Path) -> tuple[RootConfig, ...]:
    return tuple(RootConfig(Path(path)) for path in paths)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["/a", "/a"], "twice"),
        (["/a", "/a/b"], "inside"),
        (["/a/b/c", "/a"], "contains"),
        (["/", "/a"], "inside"),
    ],
)
def test_overlapping_roots_are_refused(paths: list[str], says: str) -> None:
    """Equal and nested roots are refused in either order."""
    problems = check_overlaps(roots(*paths))
    assert [says in problem.message for problem in problems] == [True]
    with pytest.raises(UsageError):
        raise_for(problems)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["/data", "/bound"], "by another name"),
        (["/data", "/bound/sub"], "lies inside"),
        (["/data/sub/deep", "/bound"], "contains"),
        (["/bound", "/twice"], "by another name"),
        (["/elsewhere", "/bound"], ""),
        (["/data/sub", "/bound/other"], ""),
    ],
)
def test_roots_that_overlap_through_a_bind_mount(paths: list[str], says: str) -> None:
    """The same directory under another name is the same root, also of one that is mounted already."""
    lines = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:1 /data /bound rw - ext4 /dev/sda1 rw\n"
    lines += "3 1 8:1 /data /twice rw - ext4 /dev/sda1 rw\n4 1 8:2 / /elsewhere rw - ext4 /dev/sdb1 rw\n"
    problems = check_overlaps(roots(*paths), mountinfo.parse(lines.encode()))
    assert [says in problem.message for problem in problems] == ([True] if says else [])
    lines = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:7 / /data rw - fuse.ciuic ciuic rw\n"
    lines += "3 1 0:7 / /bound rw - fuse.ciuic ciuic rw\n4 1 0:8 / /elsewhere rw - fuse.ciuic ciuic rw\n"
    mounts_over = mountinfo.parse(lines.encode())
    assert len(check_overlaps(roots("/data", "/bound"), mounts_over)) == 1
    assert check_overlaps(roots("/data", "/elsewhere"), mounts_over) == []


@pytest.mark.parametrize("mounted", [False, True])
def test_one_refusal_is_one_message(tmp_path: Path, mounted: bool) -> None:
    """The root directory and nested roots are refused once each, however many roots they touch."""
    inner, other = tmp_path / "in", tmp_path / "other"
    inner.mkdir()
    other.mkdir()
    there = mounts(*(f"{path} fuse.ciuic" for path in (inner, other) if mounted))
    for new in (Path("/"), tmp_path, inner / "deeper"):
        new.mkdir(exist_ok=True)
        proposal = roots(inner, other, new)
        assert len(check_roots(proposal, there, proposal[2:])) == 1
        assert len([p for p in check_places(Config(roots=proposal), there) if p.severity == "error"]) == 1


def test_neighbours_are_no_overlap() -> None:
    """Roots whose names share a prefix do not overlap."""
    assert check_overlaps(roots("/a/b", "/a/bc", "/a/b2", "/c")) == []


def test_roots_that_are_missing_or_no_directories_are_refused(tmp_path: Path) -> None:
    """A missing path, a file and a symbolic link are refused with own errors; a directory is fine."""
    (tmp_path / "file").touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("dir")
    (tmp_path / "dir" / "sub").mkdir()
    for name, error, says in [
        ("none", NotFound, "does not exist"),
        ("file/x", NotFound, "does not exist"),
        ("file", UsageError, "not a directory"),
        ("link", UsageError, "symbolic link"),
        ("link/sub", UsageError, "symbolic link"),
        ("dir/.ciuic-state", UsageError, "state directory"),
    ]:
        problems = check_root(RootConfig(tmp_path / name), mounts())
        assert [(issubclass(problem.error, error), says in problem.message) for problem in problems] == [
            (True, True)
        ], name
    assert check_root(RootConfig(tmp_path / "dir"), mounts()) == []


def test_places_that_are_no_places_for_a_root(tmp_path: Path) -> None:
    """The system's root, kernel file systems and read-only ones are refused."""
    kernel = mounts(f"{tmp_path} proc")
    read_only = mounts(f"{tmp_path} ext4 ro,relatime")
    assert "system runs on it" in check_root(RootConfig(Path("/")), mounts())[0].message
    assert "proc" in check_root(RootConfig(tmp_path), kernel)[0].message
    assert "read-only" in check_root(RootConfig(tmp_path), read_only)[0].message


def test_paths_below_or_around_a_mount_of_ours_are_refused(tmp_path: Path) -> None:
    """A root that is mounted already is fine; a path below or around one of our mounts is refused."""
    inner = tmp_path / "in"
    inner.mkdir()
    assert check_root(RootConfig(tmp_path), mounts(f"{tmp_path} fuse.ciuic")) == []
    assert "inside" in check_root(RootConfig(inner), mounts(f"{tmp_path} fuse.ciuic"))[0].message
    assert "contains" in check_root(RootConfig(tmp_path), mounts(f"{inner} fuse.ciuic"))[0].message


def test_a_root_is_listed_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path and one through links become the name under which the root is listed."""
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("dir")
    monkeypatch.chdir(tmp_path / "dir")
    assert canonical_root("sub/") == tmp_path / "dir" / "sub"
    assert canonical_root(tmp_path / "link") == tmp_path / "dir"
    assert canonical_root(tmp_path / "link" / "sub" / ".." / "sub") == tmp_path / "dir" / "sub"
    assert canonical_root("/") == Path("/")


def test_the_default_repository_shares_the_roots_file_system() -> None:
    """The default repository is at the top of the file system under the first root, mounted over or not."""
    table = mounts("/data xfs", "/data/train fuse.ciuic", "/data/train/deep tmpfs")
    assert default_repository_path(Path("/data/train"), table) == Path("/data/.ciuic_snapshots")
    assert default_repository_path(Path("/data/other"), table) == Path("/data/.ciuic_snapshots")
    assert default_repository_path(Path("/opt/train"), table) == Path("/.ciuic_snapshots")
    assert default_repository_path(Path("/data/train/deep/x"), table) == Path(
        "/data/train/deep/.ciuic_snapshots"
    )


def test_no_default_repository_inside_its_root() -> None:
    """A root that is a whole file system has no room beside it, so the repository must be named."""
    with pytest.raises(ConfigError, match="all of its file system"):
        default_repository_path(Path("/data"), mounts("/data xfs"))


def test_no_roots_and_no_repository() -> None:
    """The message without roots and repository says that no default can be derived, and what to do."""
    with pytest.raises(ConfigError) as caught:
        repository_path(Config(), mounts())
    assert "--repo" in caught.value.hint
    assert check_places(Config(), mounts()) == []


def problems_of(root: Path, repository: Path, *exclude: str) -> list[tuple[str, str]]:
    config = Config(roots=(RootConfig(root, exclude=exclude),), repository=RepositoryConfig(repository))
    return [(problem.severity, problem.message) for problem in check_places(config, mounts())]


def test_a_repository_inside_a_root_is_refused_unless_excluded(tmp_path: Path) -> None:
    """A repository inside a root is refused unless excluded; a root inside a repository always."""
    root, store = tmp_path / "root", tmp_path / "store"
    (root / "sub").mkdir(parents=True)
    (store / "sub").mkdir(parents=True)
    assert problems_of(root, store) == []
    for repository in (root / "repo", root / "sub" / "repo", root):
        assert [severity for severity, _ in problems_of(root, repository)] == ["error"]
    assert [severity for severity, _ in problems_of(root, root / "repo", "/repo")] == ["warning"]
    assert [severity for severity, _ in problems_of(root, root / "sub" / "repo", "sub")] == ["warning"]
    assert [severity for severity, _ in problems_of(store / "sub", store)] == ["error"]


def test_a_link_hides_no_repository(tmp_path: Path) -> None:
    """A repository reached through a symbolic link into the root counts as inside the root."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "door").symlink_to(root)
    assert [severity for severity, _ in problems_of(root, tmp_path / "door" / "repo")] == ["error"]


@pytest.mark.parametrize("name", ["daemon.runtime_dir", "control.socket"])
def test_the_daemons_sockets_lie_outside_every_root(tmp_path: Path, name: str) -> None:
    """A root that is the directory of a socket, or has it in it, also through a link, is refused: its worker would wait for itself."""
    root, link = tmp_path / "root", tmp_path / "link"
    root.mkdir()
    link.symlink_to(root)
    for place, refused in [
        (root, True),
        (root / "a/b", True),
        (link / "new", True),
        (tmp_path / "root2", False),
    ]:
        config = Config(
            roots=roots(root),
            repository=RepositoryConfig(tmp_path / "repo"),
            runtime_dir=place if name == "daemon.runtime_dir" else tmp_path / "run",
            control=ControlConfig(place / "c.sock" if name == "control.socket" else tmp_path / "run/c.sock"),
        )
        found = [one.message for one in check_places(config, mounts()) if one.severity == "error"]
        assert [name in message for message in found] == [True] * refused, (place, found)


def test_a_repository_that_is_a_file(tmp_path: Path) -> None:
    """A file at the path of the repository is refused."""
    (tmp_path / "root").mkdir()
    (tmp_path / "file").touch()
    assert "not a directory" in problems_of(tmp_path / "root", tmp_path / "file")[0][1]


def test_pattern_over_the_root_is_a_warning(tmp_path: Path) -> None:
    """An absolute glob that covers a root is a warning, not an empty snapshot."""
    (tmp_path / "root").mkdir()
    found = problems_of(tmp_path / "root", tmp_path / "store", f"{tmp_path}/*")
    # A root's own pattern is anchored in the root.
    assert found == []
    config = Config(
        roots=roots(tmp_path / "root"),
        exclude=(f"{tmp_path}/*",),
        repository=RepositoryConfig(tmp_path / "store"),
    )
    assert ["covers the root" in problem.message for problem in check_places(config, mounts())] == [True]


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    """The control socket's group must exist, and so must those of the page."""
    config = Config(control=ControlConfig(group="no-such-group-here"))
    assert "no group" in check_places(config, mounts())[0].message
    config = Config(web=WebConfig(look_group="root", restore_group="no-such-group-here"))
    (problem,) = check_places(config, mounts())
    assert "no group no-such-group-here" in problem.message


def test_an_alert_command_that_cannot_be_run(tmp_path: Path) -> None:
    """A missing alert command or user is a warning at the start, and the daemon starts without it."""
    program = tmp_path / "tell"
    program.write_text("")
    config = Config(alert=AlertConfig((str(program),), "no-such-user", 30))
    assert [(problem.severity, problem.message) for problem in check_places(config)] == [
        ("warning", f"alert.command: {program} is no program that can be run"),
        ("warning", "alert.user: there is no user no-such-user"),
    ]
    program.chmod(0o755)
    assert check_places(Config(alert=AlertConfig((str(program),), None, 30))) == []


def test_the_machines_own_mounts(tmp_path: Path) -> None:
    """An ordinary directory passes on the real mount table."""
    directory = Path(os.path.realpath(tmp_path)) / "root"
    directory.mkdir()
    config = Config(roots=roots(directory), repository=RepositoryConfig(directory.parent / "store"))
    assert check_places(config) == []
