"""Tests that editing a configuration file changes what was asked and nothing else."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuic.config import RemoteConfig, RootConfig, add_roots, parse_config, remove_roots, write_remote
from ciuic.config.toml_source import line_numbers, quote, statements
from ciuic.errors import ConfigError

COMMENT = st.sampled_from(["# plain", "# [[root]]", '# path = "/x"', '# "unclosed', "# ''' and \"\"\" "])
BLANKS = st.sampled_from(["", "\n", "\n\n"])
NAMES = st.sampled_from(["a", "b", "c d", 'e"f', "g]h", "i#j", "k=l", "\u00e9", "tab\there", "blank "])


@st.composite
def root_table(draw: st.DrawFn, path: str) -> str:
    literal = '"' not in path and "\t" not in path and draw(st.booleans())
    written = f"'{path}'" if literal else quote(path)
    lines = [f"path = {written}" + draw(st.sampled_from(["", "  # why"]))]
    if draw(st.booleans()):
        lines.append(
            draw(st.sampled_from(['driver = "auto"', "driver='kernel'", '"driver" = "pyfuse3" # x']))
        )
    if draw(st.booleans()):
        lists = ['["a", "b"]', '[\n  "x", # [y]\n  "]",\n]', "[ '''x#''' ]", '["""a"""]', "[]"]
        lines.append("exclude = " + draw(st.sampled_from(lists)))
    lines = draw(st.permutations(lines))
    return (
        draw(st.sampled_from(["[[root]]", "[[ root ]] # one", '[["root"]]'])) + "\n" + "\n".join(lines) + "\n"
    )


@st.composite
def remote_blocks(draw: st.DrawFn) -> list[str]:
    """Generate the texts of some remotes: none, one [remote], or several [[remote]]; each with tables of its own."""
    number = draw(st.integers(0, 3))
    header = "[remote]" if number == 1 and draw(st.booleans()) else "[[remote]]"
    blocks = []
    for index in range(number):
        lines = [header, f'name = "r{index}"', f'url = "s3://bucket-{index}" # [[root]]']
        inner = [
            '[remote.keep]\nkeep_last = 2\nkeep_tags = [\n  "a", # ]\n]',
            "[ remote . schedule ] # x\nwindow = '22:00-06:00'",
            "[remote.price]\ngb_month = 0.02",
        ]
        lines += draw(st.lists(st.sampled_from(inner), unique=True))
        blocks.append("\n".join(lines) + "\n")
    return blocks


@st.composite
def toml_files(draw: st.DrawFn) -> tuple[str, list[str], list[str]]:
    """Generate a text, its roots in order, and its comment lines between statements."""
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    roots = [f"/srv/{name}" for name in names]
    blocks = [draw(root_table(path)) for path in roots]
    for table in ('[schedule]\ninterval = "5m"\n', "[retention]\nkeep_last = 9 # nine\n", "[control]\n"):
        if draw(st.booleans()):
            blocks.insert(draw(st.integers(0, len(blocks))), table)
    for remote in draw(remote_blocks()):
        blocks.insert(draw(st.integers(0, len(blocks))), remote)
    text, comments = "", []
    for block in blocks:
        comment = draw(COMMENT) + f" {len(comments)}"
        comments.append(comment)
        text += comment + "\n" + draw(BLANKS) + block + draw(BLANKS)
    text = text.replace("\n", "\r\n") if draw(st.sampled_from([False, False, False])) else text
    return text, roots, comments


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), made=toml_files())
def test_additions_and_removals_leave_other_settings_alone(
    tmp_path: Path, data: st.DataObject, made: tuple[str, list[str], list[str]]
) -> None:
    """The roots after any additions and removals are those asked for; other settings and comments stay."""
    text, roots, comments = made
    file = tmp_path / "ciuic.toml"
    file.write_text(text)
    gone = data.draw(st.lists(st.sampled_from(roots), unique=True)) if roots else []
    new = [RootConfig(Path(f"/new/{name}")) for name in data.draw(st.lists(NAMES, unique=True, max_size=3))]

    assert set(remove_roots(file, [Path(path) for path in gone])) == {Path(path) for path in gone}
    assert add_roots(file, new) == new
    assert add_roots(file, new) == []

    result = file.read_text()
    left = [path for path in roots if path not in gone]
    assert [str(root.path) for root in parse_config(result, file).roots] == left + [
        str(root.path) for root in new
    ]
    before, after = tomli.loads(text), tomli.loads(result)
    kept_tables = [table for table in before.pop("root", []) if table["path"] not in gone]
    assert after.pop("root", [])[: len(kept_tables)] == kept_tables
    assert after == before
    assert all(comment in result for comment in comments)


@settings(max_examples=60, deadline=None)
@given(made=toml_files())
def test_positions_of_statements_are_right(made: tuple[str, list[str], list[str]]) -> None:
    """Each statement is found once, on a line that begins with its key or its header."""
    text, roots, _ = made
    lines = text.split("\n")
    found = statements(text)
    for path, line in line_numbers(found).items():
        name = path[-1] if isinstance(path[-1], str) else path[-2]
        assert str(name) in lines[line - 1]
    assert sum(s.kind == "array" and s.path[0] == "root" for s in found) == len(roots)


@settings(max_examples=60, deadline=None)
@given(made=toml_files())
def test_each_key_of_a_remote_knows_its_line(made: tuple[str, list[str], list[str]]) -> None:
    """The origin of each value of each remote is the line on which that remote has it, whatever stands around."""
    text, _, _ = made
    lines = text.split("\n")
    # Each URL is in the file once; what follows it up to the next header of a remote is of that remote.
    for remote in parse_config(text, Path("/etc/ciuic/ciuic.toml")).remotes:
        at = next(number for number, line in enumerate(lines, 1) if f'"{remote.url}"' in line)
        following = (n for n, line in enumerate(lines[at:], at + 1) if line.startswith(("[[", "[remote]")))
        end = next(following, len(lines) + 1)
        assert remote.origins["url"].line == at
        assert remote.origin.line == at - 2
        for name, origin in remote.origins.items():
            assert at - 2 < origin.line < end
            assert lines[origin.line - 1].startswith(name.rpartition(".")[2])


def test_positions_are_right_with_crlf_line_ends() -> None:
    """Statement positions are right in files with CRLF line ends."""
    text = '[schedule]\r\ninterval = "1h"\r\n\r\n[[root]]\r\npath = "/a"\r\n'
    assert line_numbers(statements(text))[("root", 0, "path")] == 5


def test_mode_owner_and_link_stay(tmp_path: Path) -> None:
    """Editing keeps the file's mode and owner, and a symbolic link to it stays a link."""
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_text("")
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12, 34)
    link.symlink_to(real)
    before = real.stat()
    add_roots(link, [RootConfig(Path("/a"))])
    after = real.stat()
    assert link.is_symlink()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (before.st_uid, before.st_gid, 0o640)
    assert parse_config(real.read_text(), real).roots[0].path == Path("/a")
    assert sorted(os.listdir(tmp_path)) == [".real.toml.lock", "link.toml", "real.toml"]


def test_a_new_file_and_its_directory_are_made(tmp_path: Path) -> None:
    """The first protect on a machine makes the file and writes the chosen repository into it."""
    file = tmp_path / "ciuic" / "ciuic.toml"
    add_roots(file, [RootConfig(Path("/a"))], repository_path=Path("/store"))
    config = parse_config(file.read_text(), file)
    assert config.repository.path == Path("/store")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "text", ["", "[repository]\n", '[repository]\nblock_size = "1MiB"', "# x\n[[root]]\npath='/b'"]
)
def test_the_repository_is_written_once(tmp_path: Path, text: str) -> None:
    """A repository path is added where none is set, and an existing one is not changed."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    add_roots(file, [], repository_path=Path("/one"))
    add_roots(file, [], repository_path=Path("/two"))
    assert parse_config(file.read_text(), file).repository.path == Path("/one")


@pytest.mark.parametrize(
    "text",
    [
        "root = []\n",
        "root = [{path = '/a'}]\n",
        "repository = {block_size = '1MiB'}\n",
        "repository.block_size = '1MiB'\n",
    ],
)
def test_file_that_cannot_be_edited_is_unchanged(tmp_path: Path, text: str) -> None:
    """A file in a form that the editor does not handle is refused and stays byte for byte."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"edited safely|by hand|\[\[root\]\]"):
        add_roots(file, [RootConfig(Path("/b"))], repository_path=Path("/r"))
    assert file.read_text() == text


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A path that is not UTF-8 cannot be written to TOML, and the message says so."""
    file = tmp_path / "c.toml"
    with pytest.raises(ConfigError, match="UTF-8"):
        add_roots(file, [RootConfig(Path(os.fsdecode(b"/\xff")))])
    assert not file.exists()


def test_the_flat_file_is_edited_in_its_own_format(tmp_path: Path) -> None:
    """The flat file, where it is in force, is edited by protect and unprotect, and keeps its comments."""
    file = tmp_path / "ciuric.conf"
    file.write_text("# old\nsnapshot_interval = 2h\nprotected_directories = /a   # one\nio_priority = idle")
    add_roots(file, [RootConfig(Path("/b,c")), RootConfig(Path("/d"))], repository_path=Path("/store"))
    config = parse_config(file.read_text(), file)
    assert [str(root.path) for root in config.roots] == ["/a", "/b,c", "/d"]
    assert config.repository.path == Path("/store")
    assert remove_roots(file, [Path("/a"), Path("/nowhere")]) == [Path("/a")]
    assert "# old\nsnapshot_interval = 2h\n" in file.read_text()
    assert "# one" in file.read_text()
    assert [str(root.path) for root in parse_config(file.read_text(), file).roots] == ["/b,c", "/d"]


def test_two_editors_at_once_lose_nothing(tmp_path: Path) -> None:
    """Concurrent protects wait for each other, and every root is there afterwards."""
    file = tmp_path / "c.toml"
    threads = [
        threading.Thread(target=add_roots, args=(file, [RootConfig(Path(f"/r{n}"))])) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {str(root.path) for root in parse_config(file.read_text(), file).roots} == {
        f"/r{n}" for n in range(8)
    }


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=toml_files(), name=st.sampled_from(["remote", "r0", "r1", "new"]), sealed=st.booleans())
def test_write_remote_changes_nothing_else(
    made: tuple[str, list[str], list[str]], name: str, sealed: bool, tmp_path: Path
) -> None:
    """A remote that is written is read back; comments and everything else stay; or the file stays as it was."""
    text, _, comments = made
    file = tmp_path / "ciuic.toml"
    file.write_bytes(text.encode())
    before = parse_config(text, file)
    known = {remote.name: remote for remote in before.remotes}
    url = known[name].url if name in known else "gs://another"
    remote = RemoteConfig(
        name=name,
        url=url,
        region="eu-1",
        encryption=sealed,
        key_file=Path("/etc/k ey") if sealed else None,
    )
    try:
        write_remote(file, remote)
    except ConfigError:
        assert file.read_bytes() == text.encode()
        # Only a single [remote], which must become one of several by hand, is refused.
        assert len(known) == 1
        assert name not in known
        return
    after = parse_config(file.read_text(), file)
    # Without their lines, which a new one above them moves.
    assert [(root.path, root.driver, root.exclude) for root in after.roots] == [
        (root.path, root.driver, root.exclude) for root in before.roots
    ]
    assert after.retention == before.retention
    assert [one for one in after.remotes if one.name != name] == [
        one for one in before.remotes if one.name != name
    ]
    written = next(one for one in after.remotes if one.name == name)
    assert written.url == url
    assert written.key_file == remote.key_file
    if name not in known:
        assert (written.encryption, written.region) == (sealed, "eu-1")
    assert all(comment in file.read_text() for comment in comments)
    assert not write_remote(file, remote)
