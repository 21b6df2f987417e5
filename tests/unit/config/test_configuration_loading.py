"""Reading configuration: both formats, defaults, origins, and mistakes named by file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.config import (
    FLAT_NAMES,
    KEYS,
    AlertConfig,
    Config,
    DrillConfig,
    ExporterConfig,
    HoldsConfig,
    IoPrioritySetting,
    MinFree,
    OverlayConfig,
    PreemptionConfig,
    WatchConfig,
    WebConfig,
    convert_flat,
    load,
    load_config,
    parse_config,
    read_text,
    shown,
)
from ciuic.config.keys import TOP, Table
from ciuic.config.values import listen_value
from ciuic.errors import ConfigError, NotPermitted

TOML = Path("/etc/ciuic/ciuic.toml")
FLAT = Path("/etc/ciuric.conf")

FLAT_TEXT = """\
# what an older installation has
snapshot_interval = 30m
retention_policy = 14d      # two weeks
exclude_patterns = /tmp/*, /dev/*, a\\,b
snapshot_dir = "/.ciuric_snapshots"
io_priority = best-effort:7
protected_directories = /opt/train, /var/lib/state
"""


def mistakes(text: str, file: Path = TOML) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, file)
    return f"{caught.value} {caught.value.hint}"


def meaning(config: Config) -> list[tuple[str, str]]:
    return [(key, value) for key, value, _ in shown(config)]


def test_an_empty_file_is_all_defaults() -> None:
    """An empty file gives the defaults documented for the command line, marked as defaults."""
    config = parse_config("", TOML)
    assert config.roots == ()
    assert config.schedule.interval_seconds == 3600
    assert config.retention.keep_within_seconds == 7 * 86400
    assert config.retention.keep_last == 3
    assert config.repository.path is None
    assert config.capture.io_priority == IoPrioritySetting("idle")
    assert config.control.socket == Path("/run/ciuic/control.sock")
    assert config.control.group is None
    assert {str(config.origin(key)) for key in KEYS} == {"default"}


def test_every_key_can_be_set_and_knows_its_line() -> None:
    """Each documented key is read, with the line on which it stands."""
    text = """\
exclude = [
  "*.tmp", # with a [bracket] and a "quote
]

[repository]
path = "/big/store"
block_size = "1MiB"
reserve = "20GiB"
trust_owner = true
[schedule]
interval = "15m"
[retention]
keep_within = "0"
keep_last = 5
keep_hourly = 24
keep_daily = 7
keep_weekly = 4
keep_monthly = 12
keep_yearly = 3
keep_tags = ["good", "paper"]
keep_emergency = 5
keep_safety = "3d"
min_free = "5%"
[capture]
io_priority = "best-effort:5"
min_share = "2.5%"
finish_within = "90s"
undo_limit = "2GiB"
[drill]
every = "7d"
scratch = "/big/scratch/"
[preemption]
clouds = ["aws", "gcp"]
grace = "45s"
endpoint = "http://127.0.0.1:8080"
[overlay]
tracked_names = ["*.rec"]
mapped_names = []
[control]
group = "ml"
[watch]
users = ["alice", "*"]
emergency_per_hour = 0
silence = 30
[holds]
max_of_a_user = 2
max_of_a_user_per_hour = 1
[web]
listen = "127.0.0.1:8470"
hosts = ["GPU07.example.org"]
actions = true
look_group = "ml"
restore_group = "ml-lead"
decide_group = "adm"
proxy_user = "nobody"
user_header = "X-Forwarded-User"
[exporter]
listen = "[::1]:9847"
otlp = "https://collector:4318/"
otlp_headers = "/etc/otlp"
[alert]
command = ["/usr/bin/tell", "a b"]
user = "nobody"
timeout = "1m"
full_within = "5d"
notify = ["json://u:p@h/x"]
ping = "https://hc.example.org/s"
[daemon]
runtime_dir = "/run/other/"
[log]
level = "debug"
format = "json"
[[root]]
path = "/opt//train/"
driver = "pyfuse3"
last_good_within = "6h"
exclude = ["/cache"]
[[trainer]]
name = "one"
pid_file = "/run/one.pid"
[[trainer]]
name = "two"
heartbeat_file = "/data/two.log"
heartbeat = "15m"
[[watch_number]]
file = "/data/events.out.tfevents.*"
key = "loss/train"
[[checkpoints]]
path = "/data/run-[0-9]/step-*/"
[[snapshot_when]]
renamed = "*.safetensors"
least_between = "5m"
[[snapshot_when]]
after = "15m"
changes = "1GiB"
per_hour = 3
"""
    config = parse_config(text, TOML)
    assert config.exclude == ("*.tmp",)
    assert config.repository.path == Path("/big/store")
    assert config.repository.block_size_bytes == 1 << 20
    assert config.repository.reserve == MinFree(size_bytes=20 << 30)
    assert config.retention.keep_within_seconds == 0
    assert config.retention.keep_yearly == 3
    assert config.retention.keep_tags == ("good", "paper")
    assert config.min_free == MinFree(share=0.05)
    assert config.min_free.floor_bytes(1000) == 50
    assert config.capture.io_priority == IoPrioritySetting("best-effort", 5)
    assert config.capture.min_share == 0.025
    assert config.capture.finish_within_seconds == 90
    assert config.capture.undo_limit_bytes == 2 << 30
    assert config.drill == DrillConfig(7 * 86400, Path("/big/scratch"))
    assert config.preemption == PreemptionConfig(("aws", "gcp"), 45, "http://127.0.0.1:8080")
    assert config.overlay == OverlayConfig(("*.rec",), ())
    assert config.control.socket == Path("/run/other/control.sock")
    assert config.watch == WatchConfig(("alice", "*"), 0, 30)
    assert config.holds == HoldsConfig(2, 1)
    assert config.exporter == ExporterConfig("[::1]:9847", "https://collector:4318", Path("/etc/otlp"))
    assert config.web == WebConfig(
        *(
            "127.0.0.1:8470",
            ("gpu07.example.org",),
            True,
            "ml",
            "ml-lead",
            "adm",
            "nobody",
            "x-forwarded-user",
        )
    )
    assert config.alert == AlertConfig(
        ("/usr/bin/tell", "a b"), "nobody", 60, 5 * 86_400, ("json://u:p@h/x",), "https://hc.example.org/s"
    )
    assert [trainer.pid_file for trainer in config.trainers] == [Path("/run/one.pid"), None]
    assert config.trainers[1].heartbeat_seconds == 900
    renamed, changed = config.snapshot_when
    assert (renamed.kind, renamed.name, renamed.least_between_seconds, renamed.per_hour) == (
        *("renamed", "*.safetensors"),
        *(300, 12),
    )
    assert (changed.name, changed.after_seconds, changed.changes_bytes, changed.per_hour) == (
        *(None, 900),
        *(1 << 30, 3),
    )
    assert ("watch_number[0].key", "loss/train") in {(row.key, row.value) for row in shown(config)}
    assert config.checkpoint_patterns == ("/data/run-[0-9]/step-*/",)
    assert ("checkpoints[0].path", "/data/run-[0-9]/step-*/") in {
        (row.key, row.value) for row in shown(config)
    }
    assert config.watch_numbers[0].file == "/data/events.out.tfevents.*"
    assert ("snapshot_when[1].changes", "1GiB") in {(row.key, row.value) for row in shown(config)}
    assert ("trainer[1].heartbeat", "15m") in {(row.key, row.value) for row in shown(config)}
    assert config.roots[0].path == Path("/opt/train")
    assert config.roots[0].driver == "pyfuse3"
    assert ("root[0].last_good_within", "6h") in {(row.key, row.value) for row in shown(config)}
    lines = text.splitlines()
    for key in KEYS:
        if key == "control.socket":
            continue
        origin = config.origin(key)
        assert origin.kind == "file"
        assert lines[origin.line - 1].startswith(key.rpartition(".")[2] + " ="), key
    assert lines[config.roots[0].origin.line - 1] == "[[root]]"
    assert config.exclude_matcher(config.roots[0]).match(b"cache", True)
    assert config.exclude_matcher(config.roots[0]).match(b"deep/x.tmp", False)


def test_the_flat_format_means_the_same() -> None:
    """The flat file's keys have the meaning of their TOML counterparts."""
    config = parse_config(FLAT_TEXT, FLAT)
    assert config.schedule.interval_seconds == 1800
    assert config.retention.keep_within_seconds == 14 * 86400
    assert config.exclude == ("/tmp/*", "/dev/*", "a,b")
    assert config.repository.path == Path("/.ciuric_snapshots")
    assert config.capture.io_priority == IoPrioritySetting("best-effort", 7)
    assert [root.path for root in config.roots] == [Path("/opt/train"), Path("/var/lib/state")]
    assert str(config.origin("schedule.interval")) == "/etc/ciuric.conf:2"


def test_conversion_to_toml_changes_no_value() -> None:
    """Conversion to TOML changes no value."""
    converted = parse_config(convert_flat(FLAT_TEXT, FLAT), TOML)
    assert meaning(converted) == meaning(parse_config(FLAT_TEXT, FLAT))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('snapshot_interval = "1h"', 1, "schedule.interval"),
        ('[schedule]\n\nintervall = "1h"', 3, "did you mean schedule.interval?"),
        ("[repository]\ncompresion = 3", 2, "`ciuic config example` prints every key"),
        ('[shedule]\ninterval = "1h"', 1, "did you mean schedule?"),
        ('[[root]]\npath = "/a"\n[[root]]\npath = "/b"\ndrivr = "auto"', 5, "did you mean root.driver?"),
        ('[schedule]\ninterval = "1 hour"', 2, "not a duration"),
        ("[schedule]\ninterval = 3600", 2, "needs a unit"),
        ('[schedule]\ninterval = "0"', 2, "at least 1s"),
        ('[retention]\nkeep_last = "3"', 2, "integer"),
        ("[retention]\nkeep_last = -1", 2, "from 0"),
        ("[retention]\nkeep_last = true", 2, "integer"),
        ('[retention]\nmin_free = "110%"', 2, "whole"),
        ('[repository]\npath = "store"', 2, "absolute"),
        ('[repository]\nblock_size = "100KiB"', 2, "power of two"),
        ('[capture]\nio_priority = "best-effort:8"', 2, "best-effort:7"),
        ('[capture]\nmin_share = "0%"', 2, "at least 0.01%"),
        ("[capture]\nmin_share = 0.5", 2, "text in quotes"),
        ('exclude = "*.tmp"', 1, "list"),
        ('exclude = ["[a"]', 1, "[a"),
        ('[schedule]\ninterval = "1h"\nexclude = ["a"]', 3, "above the first [table]"),
        ('schedule = "1h"', 1, "[schedule]"),
        ('[root]\npath = "/a"', 1, "[[root]]"),
        ('[[root]]\ndriver = "auto"', 1, "without the key path"),
        ('[[root]]\npath = "a"', 2, "absolute"),
        ('[[root]]\npath = "/a"\ndriver = "fuse"', 3, "kernel"),
        ('[log]\nlevel = "loud"', 2, "warning"),
        ('[alert]\ncommand = ["tell"]', 2, "absolute path"),
        ('[watch]\nusers = ["a b"]', 2, "name of a user"),
        ('[[trainer]]\npid_file = "/p"', 1, "without the key name"),
        ('[[trainer]]\nname = "a"', 1, "needs a pid_file"),
        ('[[trainer]]\nname = "a"\nheartbeat = "1m"', 1, "together"),
        ('[[watch_number]]\nkey = "loss"', 1, "without the key file"),
        ('[[watch_number]]\nfile = "a"', 2, "absolute"),
        ("[[checkpoints]]", 1, "without the key path"),
        ('[[checkpoints]]\npath = "step-*"', 2, "absolute"),
        ('[[checkpoints]]\npath = "!/a"', 2, "absolute"),
        ('[[checkpoints]]\npath = "/a//b"', 2, "match nothing"),
        ('[[checkpoints]]\npath = "/a/../b"', 2, "match nothing"),
        ('[[checkpoints]]\npath = "/"', 2, "matches nothing"),
        ('[[checkpoints]]\npath = "/a/["', 2, "lacks its ]"),
        ('[[checkpoints]]\npath = ["/a"]', 2, "must be a text"),
        ('[[checkpoints]]\npaths = "/a"', 2, "did you mean checkpoints.path?"),
        ('[[checkpoints]]\npath = "/a"\n' * 65, 129, "more than 64"),
        ('[[snapshot_when]]\nafter = "1m"', 1, "together"),
        ("[[snapshot_when]]\nper_hour = 1", 1, "needs one of"),
        ('[[snapshot_when]]\nrenamed = "a"\nappears = "b"', 1, "needs one of"),
        ('[[snapshot_when]]\nrenamed = "a/b"', 2, "without a slash"),
        ('[[snapshot_when]]\nrenamed = "[z"', 2, "no ] closes"),
        ('[[snapshot_when]]\nrenamed = ["a"]', 2, "must be a text"),
        ('[[snapshot_when]]\nclosed = "a"\nper_hour = 0', 3, "at least 1"),
        ('[[snapshot_when]]\nclosde = "a"', 2, "did you mean snapshot_when.closed?"),
        ('[[trainer]]\nname = "a"\npid_fil = "/p"', 3, "did you mean trainer.pid_file?"),
        ('[[trainer]]\nname = "a"\npid_file = "/p"\n[[trainer]]\nname = "a"\npid_file = "/q"', 4, "second"),
        ('[control]\nsocket = "/' + "x" * 120 + '"', 2, "too long"),
        ("[schedule\n", 1, "not TOML"),
        ('schedule.interval = "x"', 1, "not a duration"),
        ('schedule = { interval = "x" }', 1, "not a duration"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, line: int, says: str) -> None:
    """Each mistake gives file, line, what is wrong and what was probably meant."""
    message = mistakes(text)
    assert f"{TOML}:{line}: " in message
    assert says in message


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("snapshot_intervl = 1h", 1, "did you mean snapshot_interval?"),
        ("\nkeep_within = 7d", 2, "retention_policy"),
        ("io_priority = fast", 1, "idle"),
        ("[root]", 1, "TOML"),
        ("io_priority = idle\nio_priority = none", 2, "first in line 1"),
        ("protected_directories = a", 1, "absolute"),
    ],
)
def test_a_mistake_in_the_flat_format_too(text: str, line: int, says: str) -> None:
    """The flat format is as strict, and its messages name its own keys."""
    message = mistakes(text, FLAT)
    assert f"{FLAT}:{line}: " in message
    assert says in message


ON_ONE_LINE = (
    "# /etc/ciuric.conf snapshot_interval = 1h retention_policy = 7d exclude_patterns = /tmp/*, /dev/* "
    "snapshot_dir = /.ciuric_snapshots io_priority = idle"
)


@pytest.mark.parametrize(
    "text", [ON_ONE_LINE, ON_ONE_LINE.partition("conf ")[2], f"\n; first\n{ON_ONE_LINE}\n"]
)
def test_a_flat_file_on_a_single_line_is_a_mistake(text: str) -> None:
    """A flat file that is one line, all of it behind a #, is a mistake: it sets nothing, but was meant to."""
    message = mistakes(text, FLAT)
    assert "5 settings on one line" in message
    assert "every setting needs a line of its own" in message


def test_a_comment_may_name_settings() -> None:
    """A comment beside settings in force, or of one disabled setting, is a comment."""
    text = f"{ON_ONE_LINE}\nsnapshot_interval = 2h # was retention_policy = 7d, io_priority = none\n"
    assert parse_config(text, FLAT).schedule.interval_seconds == 7200
    assert parse_config("# snapshot_interval = 2h\n", FLAT).schedule.interval_seconds == 3600


def test_all_mistakes_are_named_at_once() -> None:
    """A check reports all mistakes of a file at once."""
    message = mistakes('[schedule]\ninterval = "x"\n[log]\nlevel = "y"\nzzz = 1')
    assert all(f":{line}: " in message for line in (2, 4, 5))


def test_the_order_of_search(tmp_path: Path) -> None:
    """The order is --config, CIUIC_CONFIG, the TOML file, the flat file, defaults."""
    named, variable, toml, flat = (
        tmp_path / name for name in ("n.toml", "v.toml", "ciuic.toml", "ciuric.conf")
    )
    places = (toml, flat)
    assert load_config(environ={}, searched=places).file is None
    flat.write_text("snapshot_interval = 4m\n")
    assert load_config(environ={}, searched=places).schedule.interval_seconds == 240
    for path, minutes in ((named, 1), (variable, 2), (toml, 3)):
        path.write_text(f'[schedule]\ninterval = "{minutes}m"\n')
    assert load_config(environ={}, searched=places).file == toml
    environ = {"CIUIC_CONFIG": str(variable)}
    assert load_config(environ=environ, searched=places).file == variable
    assert load_config(named, environ=environ, searched=places).file == named


def test_a_repository_of_option_or_environment_takes_precedence(tmp_path: Path) -> None:
    """--repo comes before CIUIC_REPO before the file, each with its origin."""
    file = tmp_path / "c.toml"
    file.write_text('[repository]\npath = "/file"\n')
    environ = {"CIUIC_REPO": "/variable"}
    assert load_config(file, environ={}).repository.path == Path("/file")
    config = load_config(file, environ=environ)
    assert (config.repository.path, str(config.origin("repository.path"))) == (
        Path("/variable"),
        "environment CIUIC_REPO",
    )
    config = load_config(file, repository=Path("/option"), environ=environ)
    assert (config.repository.path, str(config.origin("repository.path"))) == (
        Path("/option"),
        "option --repo",
    )


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """A named file that is missing, a directory or no text is an error, and never gives defaults."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "bytes.toml"):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path, environ={})


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without permission to read has its own exit code."""

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(load, "_read_bytes", refuse)
    with pytest.raises(NotPermitted):
        load_config(tmp_path / "c.toml", environ={})


def test_every_key_is_documented() -> None:
    """docs/configuration.md has each key with its default."""
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    flat_names = {name: flat for flat, name in FLAT_NAMES.items()}
    for key in KEYS.values():
        row = next((line for line in page.splitlines() if line.startswith(f"| `{key.name}`")), None)
        assert row is not None, f"{key.name} is not documented"
        # The lists of names are in the page's text.
        default = "" if key.name.startswith("overlay.") else key.show_effective(Config())
        assert not default or f"`{default}`" in row, row
        assert f"`{flat_names.get(key.name, '')}`" in row or key.name not in flat_names, row


def _keys_of_lists(table: Table, place: str = "") -> Iterator[tuple[str, str]]:
    for name, (_, inner) in table.lists.items():
        yield from ((f"{place}{name}", key) for key in inner.keys)
        yield from _keys_of_lists(inner, f"{place}{name}.")


@pytest.mark.parametrize(("table", "key"), [*_keys_of_lists(TOP)])
def test_every_key_of_a_list_is_documented(table: str, key: str) -> None:
    """The page and the example have each key of each list of tables, in its table or in a row of its own."""
    top = Path(__file__).parents[3]
    page = (top / "docs" / "configuration.md").read_text()
    assert f"`{table}.{key}`" in page or re.search(rf"^(# )?{key} = |^\| .*`{key}`", page, re.MULTILINE)
    assert re.search(rf"^# \[+{re.escape(table)}\]+$", (top / "etc" / "ciuic.toml").read_text(), re.MULTILINE)


def test_example_is_valid() -> None:
    """The example in etc/ is valid as it stands, and with every commented setting enabled."""
    file = Path(__file__).parents[3] / "etc" / "ciuic.toml"
    text = file.read_text()
    assert parse_config(text, file).roots == ()
    setting = re.compile(r"# (?=(\w+ = |\[[\[\w.\]]+$))")
    config = parse_config("".join(setting.sub("", line) for line in text.splitlines(keepends=True)), file)
    assert len(config.roots) == len(config.trainers) == len(config.remotes) == 1
    unset = {"repository.block_size", "repository.trust_owner", "daemon.runtime_dir"}
    assert {key for key in KEYS if config.origin(key).kind == "default"} == unset


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "0.0.0.0:65535", "[::]:9847", "[::1]:80"])
def test_addresses_to_listen_at(listen: str) -> None:
    """An address with a port is kept as it was written."""
    assert listen_value(listen) == listen


@pytest.mark.parametrize(
    "listen",
    ["9847", ":9847", "localhost:9847", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1_0",
     "::1:9847", "[127.0.0.1]:9847", "127.0.0.1:99999999999", "127.0.0.1:\u0661"],
)  # fmt: skip
def test_refused_addresses_to_listen_at(listen: str) -> None:
    """What is no numeric address with a port is refused."""
    with pytest.raises(ValueError, match="must be an address and a port"):
        listen_value(listen)


def test_a_pipe_without_a_writer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe in the place of the file is refused when nothing comes; what somebody writes into it is read."""
    pipe = tmp_path / "ciuic.toml"
    os.mkfifo(pipe)
    monkeypatch.setattr(load, "_PIPE_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="nothing has come"):
        read_text(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"[schedule]\n")
    with pytest.raises(ConfigError, match="nothing has come"):
        # Its writer is still there and may go on.
        read_text(pipe)
    os.write(writer, b"[schedule]\n")
    os.close(writer)
    assert read_text(pipe) == "[schedule]\n"
    os.close(reader)


def test_an_endless_file_is_refused() -> None:
    """No device makes a command read for ever."""
    with pytest.raises(ConfigError, match="at most 16 MiB"):
        read_text(Path("/dev/zero"))
    assert read_text(Path("/dev/null")) == ""
