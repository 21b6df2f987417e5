"""Tests of remotes in a configuration: each key, its line and its default; what a mistake says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ciuic.config import (
    REMOTE_KEYS,
    Config,
    DailyWindow,
    RemoteConfig,
    RemotePrice,
    RemoteSchedule,
    check_places,
    check_text,
    parse_config,
    shown,
)
from ciuic.config.load import parse_leniently
from ciuic.config.model import DEFAULT_REMOTE_NAME
from ciuic.config.values import window_value
from ciuic.errors import ConfigError
from ciuic.retention import RetentionPolicy

TOML = Path("/etc/ciuic/ciuic.toml")
EVERY_KEY = """\
[remote]
name = "cold-1"
url = "oss://bucket/some/prefix/"
endpoint = "https://oss.example.org:8443/"
region = "cn-hangzhou"
bandwidth = "50MiB"
max_lag = "1d"
status_every = "1h"
encryption = true
key_file = "/etc/ciuic/cold.key"
storage_class = "IA"
[remote.keep]
keep_within = "90d"
keep_last = 1
keep_hourly = 2
keep_daily = 3
keep_weekly = 4
keep_monthly = 5
keep_yearly = 6
keep_tags = ["paper"]
keep_emergency = 7
keep_safety = "1d"
[remote.schedule]
interval = "6h"
window = "22:00-06:00"
[remote.price]
put_per_1000 = 0.005
get_per_1000 = 1
gb_month = 0.023
"""


def mistakes(text: str, file: Path = TOML) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, file)
    return f"{caught.value} {caught.value.hint}"


def remote_of(text: str) -> RemoteConfig:
    (remote,) = parse_config(text, TOML).remotes
    return remote


def test_every_key_of_a_remote_is_read_and_knows_its_line() -> None:
    """Each key of REMOTE_KEYS is read, but one of the two of the key itself and those of ssh, with the line on which it stands."""
    remote = remote_of(EVERY_KEY)
    assert remote == RemoteConfig(
        name="cold-1",
        url="oss://bucket/some/prefix",
        endpoint="https://oss.example.org:8443",
        region="cn-hangzhou",
        bandwidth_bytes=50 << 20,
        max_lag_seconds=86400,
        status_every_seconds=3600,
        key_file=Path("/etc/ciuic/cold.key"),
        storage_class="IA",
        keep=RetentionPolicy(
            keep_within_seconds=90 * 86400,
            keep_last=1,
            keep_hourly=2,
            keep_daily=3,
            keep_weekly=4,
            keep_monthly=5,
            keep_yearly=6,
            keep_tags=("paper",),
            keep_emergency=7,
            keep_safety_seconds=86400,
        ),
        schedule=RemoteSchedule(6 * 3600, DailyWindow(22 * 60, 6 * 60)),
        price=RemotePrice(0.005, 1.0, 0.023),
    )
    lines = EVERY_KEY.splitlines()
    assert remote.origin.line == 1
    assert remote.origins.keys() == REMOTE_KEYS.keys() - {"key_command", "ssh_command", "ssh_program"}
    for name, origin in remote.origins.items():
        assert lines[origin.line - 1].startswith(name.rpartition(".")[2] + " ="), name


def test_the_keys_of_ssh() -> None:
    """A remote over ssh has its program and options, and ciuic on the other side; its URL keeps user, port and case."""
    remote = remote_of(
        '[remote]\nurl = "ssh://me@Nas:2222/~/ciuic/"\nssh_command = "ssh -i /k"\nssh_program = "/opt/ciuic/bin/ciuic"\n'
    )
    assert (remote.url, remote.ssh_command, remote.ssh_program) == (
        "ssh://me@Nas:2222/~/ciuic",
        "ssh -i /k",
        "/opt/ciuic/bin/ciuic",
    )


def test_a_remote_of_its_url_alone_has_the_defaults() -> None:
    """A remote with nothing but a URL is encrypted, unlimited, and has the documented retention."""
    remote = remote_of('remote.url = "s3://bucket"')
    assert remote == RemoteConfig(
        name="remote",
        url="s3://bucket",
        keep=RetentionPolicy(keep_within_seconds=30 * 86400, keep_last=10, keep_emergency=10),
    )
    assert parse_config("", TOML).remotes == ()


def test_a_remote_keeps_no_less_than_the_host() -> None:
    """A rule that [remote.keep] leaves out is the larger of its default and the local one; a set one counts."""
    local = '[retention]\nkeep_within = "60d"\nkeep_last = 2\nkeep_daily = 14\nkeep_tags = ["paper"]\nkeep_safety = "9d"\n'
    text = local + '[remote]\nurl = "s3://bucket"\n[remote.keep]\nkeep_emergency = 0\n'
    assert remote_of(text).keep == RetentionPolicy(
        keep_within_seconds=60 * 86400,
        keep_last=10,
        keep_daily=14,
        keep_tags=("paper",),
        keep_emergency=0,
        keep_safety_seconds=9 * 86400,
    )
    # In any order of the tables: the local rules may follow the remote.
    first, second = text.split("[remote]", 1)
    assert remote_of(f"[remote]{second}{first}").keep == remote_of(text).keep


def test_several_remotes_have_tables_of_their_own() -> None:
    """Tables in a [[remote]] belong to the remote above them, and each key knows its line."""
    text = '[[remote]]\nname = "a"\nurl = "s3://one"\n[remote.keep]\nkeep_last = 1\n\n[[remote]]\nname = "b"\nurl = "file:///nas"\n[remote.keep]\nkeep_last = 2\n'
    first, second = parse_config(text, TOML).remotes
    assert [(one.name, one.keep.keep_last) for one in (first, second)] == [("a", 1), ("b", 2)]
    assert (first.origin.line, second.origin.line) == (1, 7)
    assert (first.origins["keep.keep_last"].line, second.origins["keep.keep_last"].line) == (5, 11)


def test_show_has_every_key_of_a_remote() -> None:
    """`config show` has a row for each key, whose value can be written into a file again."""
    rows = {row.key: row for row in shown(parse_config(EVERY_KEY, TOML)) if row.key.startswith("remote[0].")}
    assert rows.keys() == {f"remote[0].{name}" for name in REMOTE_KEYS}
    values = {name: rows[f"remote[0].{name}"].value for name in REMOTE_KEYS}
    assert values["bandwidth"] == "50MiB"
    assert values["schedule.window"] == "22:00-06:00"
    assert values["encryption"] == "true"
    assert values["price.gb_month"] == "0.023"
    assert values["key_command"] == ""
    assert str(rows["remote[0].url"].origin) == f"{TOML}:3"
    assert str(rows["remote[0].key_command"].origin) == "default"


S3 = 'url = "s3://bucket"\n'


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("remote = 3", 1, "[[remote]] for each of several"),
        ("remote = [1]", 1, "is a table"),
        ("[remote]\n", 1, "without the key url"),
        ('[remote]\nurl = "bucket"', 2, "s3://"),
        ('[remote]\nurl = "memory://x"', 2, "s3://"),
        ('[remote]\nurl = "s3://"', 2, "a bucket after s3://"),
        ('[remote]\nurl = "az://-/x"', 2, "a container after az://"),
        ('[remote]\nurl = "s3://bucket/a/../b"', 2, ".. part"),
        ('[remote]\nurl = "s3://bucket//b"', 2, "empty"),
        ('[remote]\nurl = "s3://bucket/a b"', 2, "blanks"),
        ('[remote]\nurl = "s3://bucket?region=x"', 2, "keys of their own"),
        ('[remote]\nurl = "file://nas/x"', 2, "file:///mnt/nas"),
        ('[remote]\nurl = "file:///"', 2, "file:///mnt/nas"),
        (f'[remote]\n{S3}endpoint = "minio:9000"', 3, "http:// or https://"),
        (f'[remote]\n{S3}endpoint = "https://h:99999"', 3, "http:// or https://"),
        (f'[remote]\n{S3}bandwidth = "1KiB"', 3, "at least 64KiB"),
        (f'[remote]\n{S3}bandwidth = "50MiB/s"', 3, "not a size"),
        (f'[remote]\n{S3}max_lag = "0"', 3, "at least 1s"),
        (f'[remote]\n{S3}encryption = "no"', 3, "true or false"),
        (f'[remote]\n{S3}key_file = "k"', 3, "absolute"),
        (f'[remote]\n{S3}key_command = ["pass"]', 3, "absolute path of a program"),
        (f'[remote]\n{S3}key_file = "/k"\nkey_command = ["/bin/pass"]', 4, "together"),
        (f'[remote]\n{S3}encryption = false\nkey_file = "/k"', 4, "without encryption"),
        ('[remote]\nurl = "file:///nas"\nregion = "x"', 3, "for a directory"),
        ('[remote]\nurl = "ssh://nas/d"\nregion = "x"', 3, "for a directory"),
        ('[remote]\nurl = "ssh://me:secret@nas/d"', 2, "no password"),
        ('[remote]\nurl = "ssh://-oX@nas/d"', 2, "no password"),
        ('[remote]\nurl = "ssh://nas"', 2, "must have a directory"),
        ('[remote]\nurl = "ssh://nas/~"', 2, "must have a directory"),
        ('[remote]\nurl = "file:///nas"\nssh_command = "ssh"', 3, "no use for file://"),
        (f'[remote]\n{S3}ssh_program = "ciuic"', 3, "no use for s3://"),
        ('[remote]\nurl = "ssh://nas/d"\nssh_command = "ssh\\n-v"', 3, "one line"),
        ('[remote]\nurl = "oss://bucket"', 2, "remote.region must be set"),
        (f'[remote]\n{S3}name = "A"', 3, "a-z"),
        (f'[remote]\n{S3}name = "-x"', 3, "not begin with -"),
        (f'[remote]\n{S3}name = "{"x" * 33}"', 3, "1 to 32"),
        (f'[remote]\n{S3}keep = "30d"', 3, "write [remote.keep]"),
        (f"[remote]\n{S3}[remote.keep]\nkeep_lst = 1", 4, "did you mean remote.keep.keep_last?"),
        (f'[remote]\n{S3}"keep.keep_last" = 1', 3, "unknown key remote.keep.keep_last"),
        (f'[remote]\n{S3}interval = "1h"', 3, "did you mean remote.schedule.interval?"),
        (f'[remote]\n{S3}endpont = "x"', 3, "did you mean remote.endpoint?"),
        (f'[remote]\n{S3}[remote.schedule]\nwindow = "22-6"', 4, '"22:00-06:00"'),
        (f'[remote]\n{S3}[remote.schedule]\nwindow = "00:00-24:00"', 4, "leave it out for always"),
        (f"[remote]\n{S3}[remote.price]\ngb_month = -1", 4, "number"),
        (f"[remote]\n{S3}[remote.price]\ngb_month = nan", 4, "number"),
        (f"[remote]\n{S3}[remote.price]\ngb_month = true", 4, "number"),
        (f'[[remote]]\n{S3}[[remote]]\nname = "b"\nurl = "s3://other"', 1, "of several, each needs one"),
        (f'[[remote]]\nname = "a"\n{S3}[[remote]]\nname = "a"\nurl = "s3://other"', 5, "second"),
        (f'[[remote]]\nname = "a"\n{S3}[[remote]]\nname = "b"\n{S3}', 6, "second"),
        ("[remoet]\n", 1, "did you mean remote?"),
    ],
)
def test_a_mistake_in_a_remote_is_named_with_its_line(text: str, line: int, says: str) -> None:
    """Each mistake gives file, line, what is wrong and what was probably meant."""
    message = mistakes(text)
    assert f"{TOML}:{line}: " in message
    assert says in message


@pytest.mark.parametrize(
    "text",
    [
        'url = "s3://AKIA:geheim@bucket/x"',
        'url = "s3:AKIA:geheim@bucket"',
        S3 + 'endpoint = "https://AKIA:geheim@minio"',
        S3 + 'endpoint = "AKIA:geheim@minio"',
    ],
)
def test_credentials_are_refused_and_not_printed(text: str) -> None:
    """A URL with credentials is a mistake, whose message has none of them."""
    message = mistakes(f"[remote]\n{text}")
    assert "must not have credentials" in message
    assert "AKIA" not in message
    assert "geheim" not in message


@pytest.mark.parametrize("line", ["remote = s3://bucket", "remote.url = s3://bucket"])
def test_the_flat_format_says_that_it_has_no_remotes(line: str) -> None:
    """A remote in a flat file is a mistake that names the way to TOML."""
    message = mistakes(f"snapshot_interval = 1h\n{line}\n", Path("/etc/ciuric.conf"))
    assert "/etc/ciuric.conf:2: the flat format has no remotes" in message
    assert "ciuic config convert" in message


def test_a_mistake_in_a_remote_leaves_the_others(tmp_path: Path) -> None:
    """What is read of an invalid file has the remotes without a mistake."""
    file = tmp_path / "c.toml"
    file.write_text(
        '[[remote]]\nname = "a"\nurl = "s3://one"\nbandwidth = "x"\n[[remote]]\nname = "b"\nurl = "s3://two"\n'
    )
    assert [remote.name for remote in parse_leniently(file).remotes] == ["b"]
    config, problems = check_text(file.read_text(), file)
    assert config is None
    assert [problem.origin.line for problem in problems] == [4]


@given(start=st.integers(0, 1439), end=st.integers(1, 1440), minute=st.integers(0, 1439))
def test_a_window_is_open_from_its_start_for_its_length(start: int, end: int, minute: int) -> None:
    """A window, also one over midnight, is open exactly from its start until its end, and reads back as written."""
    if (end - start) % 1440 == 0:
        with pytest.raises(ValueError, match="leave it out"):
            window_value(str(DailyWindow(start, end)))
        return
    window = window_value(str(DailyWindow(start, end)))
    assert window == DailyWindow(start, end)
    assert window.is_open(minute) is ((minute - start) % 1440 < (end - start) % 1440)


def test_every_key_of_a_remote_is_documented() -> None:
    """docs/configuration.md has each key with its default; the example has each table."""
    top = Path(__file__).parents[3]
    page = (top / "docs" / "configuration.md").read_text()
    for key in REMOTE_KEYS.values():
        row = next((line for line in page.splitlines() if line.startswith(f"| `remote.{key.name}`")), None)
        assert row is not None, f"remote.{key.name} is not documented"
        default = key.show_effective(RemoteConfig(name=DEFAULT_REMOTE_NAME, url=""))
        assert not default or f"`{default}`" in row, row
    example = (top / "etc" / "ciuic.toml").read_text()
    assert all(f"# [{table}]\n" in example for table in ("remote", *_tables()))


def _tables() -> set[str]:
    return {f"remote.{name.partition('.')[0]}" for name in REMOTE_KEYS if "." in name}


def test_the_keys_of_a_remotes_retention_are_those_of_a_policy() -> None:
    """[remote.keep] has every rule of a RetentionPolicy, under its name in [retention]."""
    rules = {name.removesuffix("_seconds") for name in RetentionPolicy.__struct_fields__}
    assert {name.removeprefix("keep.") for name in REMOTE_KEYS if name.startswith("keep.")} == rules


def check(remote: RemoteConfig) -> list[str]:
    return [str(problem) for problem in check_places(Config(remotes=(remote,)))]


def test_key_files_and_programs_are_checked(tmp_path: Path) -> None:
    """A key that is missing, that others may read, or that is no file or program, is a warning."""
    remote = RemoteConfig(name="r", url="s3://bucket")
    assert any("neither key_file nor key_command" in problem for problem in check(remote))
    assert check(replace(remote, encryption=False)) == []
    key = tmp_path / "key"
    assert any(f"there is no file {key}" in one for one in check(replace(remote, key_file=key)))
    assert any("not a regular file" in one for one in check(replace(remote, key_file=tmp_path)))
    key.write_bytes(bytes(32))
    key.chmod(0o640)
    assert any("mode 0640" in one for one in check(replace(remote, key_file=key)))
    key.chmod(0o600)
    assert not any("mode" in one for one in check(replace(remote, key_file=key)))
    assert any("no program" in one for one in check(replace(remote, key_command=(str(key),))))
    assert check(replace(remote, key_command=("/bin/true", "x"))) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is told what others may change")
def test_a_key_that_others_may_replace_is_told(tmp_path: Path) -> None:
    """A key file in a directory of another user is a warning for root."""
    place = tmp_path / "other"
    place.mkdir()
    key = place / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    os.chown(place, 12345, 12345)
    found = check(RemoteConfig(name="r", url="s3://bucket", key_file=key))
    assert any(f"directory {place}" in one for one in found)
