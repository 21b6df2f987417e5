"""`ciuic hold`, `release`, `forget`, `prune`, `check` and `protect` on real repositories, no daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.cli_repository import CliRepository

from ciuic.cli.app import cli
from ciuic.cli.shared import session
from ciuic.protocol.state_directory import open_state
from ciuic.protocol.stored_remotely import StoredRecord, write_record
from ciuic.protocol.worker_frames import worker_socket
from ciuic.repository import Repository

# httpcore drops a unix socket that could not connect without closing it; the collector does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    for number in range(5):
        made.snapshot({b"a": os.urandom(5000), b"b": b"%d" % number})
    return made


def ids(repository: CliRepository) -> list[str]:
    return [line.split("|")[0] for line in repository.run("list", "--machine-readable").stdout.splitlines()]


def held(repository: CliRepository) -> dict[str, str]:
    snapshots = json.loads(repository.run("list", "--json").stdout)["snapshots"]
    return {snapshot["id"]: snapshot["hold_reason"] for snapshot in snapshots if snapshot["held"]}


def test_a_hold_stays_until_it_is_released(repository: CliRepository) -> None:
    """A hold with its reason is there until released."""
    assert repository.run("hold", "cs-000002", "latest", "-m", "the paper's run").exit_code == 0
    assert held(repository) == {"cs-000002": "the paper's run", "cs-000005": "the paper's run"}
    result = repository.run("release", "000002", "--json")
    assert json.loads(result.stdout) == {"snapshots": [{"id": "cs-000002", "held": False, "hold_reason": ""}]}
    assert list(held(repository)) == ["cs-000005"]


def test_tags_and_messages_change_afterwards(repository: CliRepository) -> None:
    """They are durable, are shown at once, survive a lost catalogue and a hold, and retention keeps by them."""
    made = str(repository.snapshot({b"a": b"x"}, tags=("old", "kept"), message="before"))
    result = repository.run(
        "tag", made, "latest~1", "--add", "best", "--remove", "old", "-m", "loss 0.1", "--json"
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["snapshots"][0] == {
        "id": made,
        "tags": ["kept", "best"],
        "message": "loss 0.1",
    }
    repository.run("hold", made, "-m", "why")
    repository.run("release", made)

    def shown() -> list[tuple[list[str], str]]:
        listed = json.loads(repository.run("list", "--json").stdout)["snapshots"]
        return [(one["tags"], one["message"]) for one in listed[:2]]

    assert shown() == [(["kept", "best"], "loss 0.1"), (["best"], "loss 0.1")]
    for file in repository.path.glob("index.sqlite*"):
        file.unlink()
    assert shown() == [(["kept", "best"], "loss 0.1"), (["best"], "loss 0.1")]
    assert (
        next(
            line.split("|")[0]
            for line in repository.run("list", "--tag", "best", "--machine-readable").stdout.split()
        )
        == made
    )
    assert repository.run("tag", made, "-m", "").exit_code == 0
    assert shown()[0] == (["kept", "best"], "")


def test_facts_are_not_rewritten(repository: CliRepository) -> None:
    """Tags that say what a snapshot is cannot be given or taken, nor can its explanation; nothing of the call is done then."""
    safety = str(
        repository.snapshot({b"a": b"x"}, tags=("safety",), message="before the restore from cs-000001")
    )
    for words in (
        ("--add", "verified"),
        ("--remove", "safety"),
        ("-m", "nothing special"),
        (),
    ):
        result = repository.run("tag", "cs-000001", safety, *words)
        assert result.exit_code in (1, 2), result.output
    listed = json.loads(repository.run("list", "--all", "--json").stdout)["snapshots"]
    assert {one["id"]: (one["tags"], one["message"]) for one in listed}[safety] == (
        ["safety"],
        "before the restore from cs-000001",
    )
    assert all(not one["tags"] for one in listed if one["id"] != safety)


def test_one_unknown_id_changes_nothing(repository: CliRepository) -> None:
    """An unknown id among several makes the command change nothing."""
    assert repository.run("hold", "latest", "cs-ffffff").exit_code == 3
    assert held(repository) == {}
    assert repository.run("forget", "-y", "latest", "cs-ffffff").exit_code == 3
    assert len(ids(repository)) == 5


def test_busy_repository_is_75(repository: CliRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing commands exit with 75 and name the process that has the lock; reading works."""
    monkeypatch.setattr(session, "LOCK_WAIT_SECONDS", 0.0)
    with Repository.open(repository.path) as opened, opened.writer(command="capture"):
        result = repository.run("hold", "latest")
        assert result.exit_code == 75
        assert str(os.getpid()) in result.stderr
        assert len(ids(repository)) == 5


def test_forget_asks_or_wants_yes(repository: CliRepository) -> None:
    """Forget without a terminal removes nothing and says to give -y."""
    result = repository.run("forget", "cs-000001")
    assert result.exit_code == 2
    assert "-y" in result.stderr
    assert len(ids(repository)) == 5


def test_forget_removes_exactly_these(repository: CliRepository) -> None:
    """`forget -y` removes the named snapshots and no other."""
    result = repository.run("forget", "-y", "cs-000001", "latest~1", "--json")
    assert json.loads(result.stdout) == {"removed": ["cs-000001", "cs-000004"]}
    assert ids(repository) == ["cs-000005", "cs-000003", "cs-000002"]


def test_forget_refuses_held_snapshots(repository: CliRepository) -> None:
    """Forget removes nothing with a held snapshot among the named ones."""
    repository.run("hold", "cs-000002")
    result = repository.run("forget", "-y", "cs-000001", "cs-000002")
    assert result.exit_code == 1
    assert "ciuic release cs-000002" in result.stderr
    assert len(ids(repository)) == 5


def test_forget_of_an_unreadable_snapshot(repository: CliRepository) -> None:
    """A snapshot file that cannot be read can be forgotten by its full id."""
    (repository.path / "snapshots" / "cs-000003").write_bytes(b"garbage")
    result = repository.run("forget", "-y", "cs-000003")
    assert result.exit_code == 0, result.stderr
    assert not (repository.path / "snapshots" / "cs-000003").exists()
    assert len(ids(repository)) == 4


def configured(repository: CliRepository, tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return ["--config", str(file)]


def test_prune_gives_the_reason_for_each_kept_snapshot(repository: CliRepository, tmp_path: Path) -> None:
    """Prune keeps what a rule keeps and gives each reason; a dry run prints the same and removes nothing."""
    options = configured(repository, tmp_path, '[retention]\nkeep_within = "0"\nkeep_last = 2\n')
    repository.run("hold", "cs-000001")
    dry = json.loads(repository.run(*options, "prune", "--dry-run", "--json").stdout)
    assert dry["removed"] == ["cs-000002", "cs-000003"]
    assert len(ids(repository)) == 5
    text = repository.run(*options, "prune").stdout
    assert "held" in next(line for line in text.splitlines() if line.startswith("cs-000001"))
    assert "removed" in next(line for line in text.splitlines() if line.startswith("cs-000002"))
    assert ids(repository) == ["cs-000005", "cs-000004", "cs-000001"]
    assert repository.run("verify", "--all", "--checksum").exit_code == 0


def test_prune_keeps_what_a_remote_lacks(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prune keeps what a remote of the configuration lacks; when the disk fills it goes, and a warning names it."""
    state, config = tmp_path / "upload", tmp_path / "remotes.toml"
    state.mkdir()
    monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(state))
    rules = '[retention]\nkeep_within = "0"\nkeep_last = 1\n'
    remote = '[remote]\nname = "nas"\nurl = "file:///mnt/nas"\n'
    config.write_text(f'[repository]\npath = "{repository.path}"\n{rules}{remote}')
    with Repository.open(repository.path) as opened:
        record = StoredRecord(
            repository=opened.id,
            stored=frozenset({"cs-000001", "cs-000002", "cs-000005"}),
            tail_ns=1,
            seen_ns=time.time_ns(),
        )
    write_record("nas", record)
    # There is no such place: the word of an upload that has just looked is all there is.
    monkeypatch.setattr("ciuic.remote.remote_look.look_at", lambda *words, **named: None)

    def prune(*words: str, named: str = "") -> Result:
        return repository.run("--config", str(config), "prune", *words, env={"CIUIC_REPO": named})

    text = prune("--dry-run").stdout
    assert len(re.findall("not on remote nas yet", text)) == 2
    # Named by the environment, the repository counts through the remote's own record of it.
    assert prune("--dry-run", named=str(repository.path)).stdout == text
    assert json.loads(prune("--json").stdout)["removed"] == ["cs-000001", "cs-000002"]
    config.write_text(config.read_text().replace(rules, rules + 'min_free = "100%"\n'))
    result = prune()
    assert result.exit_code == 0
    assert "2 snapshots removed before every remote had stored them: cs-000003, cs-000004" in result.stderr
    assert "remote nas does not have it" in result.stdout
    assert ids(repository) == ["cs-000005"]


def test_an_unreadable_record_of_a_remote_is_told(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prune keeps everything for a remote whose record cannot be read, and says so."""
    config = tmp_path / "remotes.toml"
    (tmp_path / "upload" / "nas").mkdir(parents=True)
    (tmp_path / "upload" / "nas" / "stored").symlink_to("/etc/passwd")
    monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(tmp_path / "upload"))
    config.write_text(
        f'[repository]\npath = "{repository.path}"\n[retention]\nkeep_within = "0"\nkeep_last = 1\n'
        '[remote]\nname = "nas"\nurl = "file:///mnt/nas"\n'
    )
    result = repository.run("--config", str(config), "prune", env={"CIUIC_REPO": ""})
    assert result.exit_code == 0, result.stderr
    assert "remote nas: what the remote has stored cannot be read" in result.stderr
    assert len(ids(repository)) == 5


def test_prune_refuses_while_something_cannot_be_read(repository: CliRepository, tmp_path: Path) -> None:
    """Prune removes nothing at all with an unreadable snapshot file, and exits with 4."""
    options = configured(repository, tmp_path, '[retention]\nkeep_within = "0"\nkeep_last = 1\n')
    (repository.path / "snapshots" / "cs-000003").write_bytes(b"garbage")
    assert repository.run(*options, "prune").exit_code == 4
    assert len(os.listdir(repository.path / "snapshots")) == 5


def test_repair_rebuilds_an_index_that_is_gone(repository: CliRepository) -> None:
    """Check of a sound repository exits with 0, also without its index, which --repair rebuilds."""
    assert repository.run("check").exit_code == 0
    for path in repository.path.glob("*.sqlite*"):
        path.unlink()
    assert repository.run("check", "--repair").exit_code == 0
    assert len(ids(repository)) == 5
    document = json.loads(repository.run("check", "--read-data", "--json").stdout)
    assert (document["damaged"], document["snapshots"]) == (False, 5)


def test_check_of_damage_is_4(repository: CliRepository) -> None:
    """Damage that remains makes check exit with 4, with or without --repair."""
    (repository.path / "snapshots" / "cs-000003").write_bytes(b"garbage")
    assert repository.run("check").exit_code == 4
    assert repository.run("check", "--repair").exit_code == 4


# protect, with no daemon running


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c.toml").write_text(
        f'# mine\n[repository]\npath = "{tmp_path}/repo"\n[control]\nsocket = "{tmp_path}/s"\n'
    )
    return tmp_path


def protect(host: Path, *paths: Any, option: str = "protect") -> Result:
    words = ["--config", str(host / "c.toml"), option, *map(str, paths)]
    return CliRunner().invoke(cli, words, env={"CIUIC_REPO": ""})


def test_protect_writes_configuration_and_repository(host: Path) -> None:
    """protect makes the repository, adds the roots, keeps other settings, and says that no daemon runs."""
    result = protect(host, host / "a", host / "b")
    assert result.exit_code == 0, result.stderr
    assert Repository.exists(host / "repo")
    text = (host / "c.toml").read_text()
    assert text.startswith("# mine\n")
    assert f'path = "{host}/a"' in text
    assert f'path = "{host}/b"' in text
    assert "no daemon is running" in result.stderr


def test_protect_twice_is_protect_once(host: Path) -> None:
    """protect run again, or with a path named twice, changes nothing and succeeds."""
    protect(host, host / "a")
    before = (host / "c.toml").read_bytes()
    result = protect(host, host / "a")
    assert result.exit_code == 0
    assert "already" in result.stdout
    assert (host / "c.toml").read_bytes() == before
    assert protect(host, host / "b", host / "b").stdout.count("protected") == 1


@pytest.mark.parametrize(
    ("path", "code", "word"),
    [
        ("missing", 3, "does not exist"),
        ("c.toml", 2, "not a directory"),
        ("a/inner", 2, "inside"),
        (".", 2, "contains"),
        ("repo", 2, "repository"),
        ("/", 2, "cannot be protected"),
    ],
)
def test_unfit_paths_change_nothing(host: Path, path: str, code: int, word: str) -> None:
    """A missing path, a file, a nested or enclosing root, and the repository are refused by name."""
    protect(host, host / "a")
    (host / "a" / "inner").mkdir()
    before = (host / "c.toml").read_bytes()
    result = protect(host, host / "b", host / path)
    assert result.exit_code == code, result.stderr
    assert word in result.stderr
    assert (host / "c.toml").read_bytes() == before


@pytest.mark.mount
def test_a_root_under_another_name_is_refused(host: Path) -> None:
    """A bind mount of a root, or of a directory in it, is refused once as that root, and nothing changes."""
    protect(host, host / "a")
    before = (host / "c.toml").read_bytes()
    (host / "a" / "inner").mkdir()
    for source, word in (("a", "by another name"), ("a/inner", "lies inside")):
        subprocess.run(["mount", "--bind", host / source, host / "b"], check=True)
        try:
            result = protect(host, host / "b")
        finally:
            subprocess.run(["umount", host / "b"], check=True)
        assert result.exit_code == 2, result.stderr
        assert word in result.stderr
        # The one message names "the root" twice.
        assert result.stderr.count("the root") == 2
    assert (host / "c.toml").read_bytes() == before


@pytest.mark.parametrize("path", ["/", ".", "a/inner"])
def test_refusal_is_printed_once(host: Path, path: str) -> None:
    """A new root that touches several others is refused with one message."""
    protect(host, host / "a", host / "b")
    (host / "a" / "inner").mkdir()
    result = protect(host, host / path)
    assert result.exit_code == 2
    assert len([line for line in result.stderr.splitlines() if "the root" in line]) == 1


def test_missing_driver_is_named(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is protected with --driver pyfuse3 but without pyfuse3, and the driver in use is named."""
    monkeypatch.setattr("ciuic.cli.commands.protect.find_spec", lambda name: None)
    result = protect(host, "--driver", "pyfuse3", host / "a")
    assert result.exit_code == 0
    assert "kernel driver" in result.stderr
    assert "kernel driver" not in protect(host, host / "b").stderr


def test_processes_that_go_round_are_named(host: Path) -> None:
    """A process with a file open below the new root is named, with its pid and the file."""
    with open(host / "a" / "open.log", "w") as log, subprocess.Popen(["sleep", "100"], stdout=log) as job:
        try:
            result = protect(host, host / "a")
        finally:
            job.kill()
    assert re.search(rf"{job.pid} +sleep 100 +.*open\.log", result.stderr)


def test_unprotect_leaves_files_and_snapshots(host: Path) -> None:
    """unprotect removes the root from the configuration; directory and repository stay."""
    protect(host, host / "a", host / "b")
    (host / "a" / "file").write_text("x")
    result = protect(host, host / "a", option="unprotect")
    assert result.exit_code == 0, result.stderr
    assert f'path = "{host}/a"' not in (host / "c.toml").read_text()
    assert f'path = "{host}/b"' in (host / "c.toml").read_text()
    assert (host / "a" / "file").read_text() == "x"
    assert Repository.exists(host / "repo")


def test_unprotect_without_a_daemon_takes_the_state_along(host: Path) -> None:
    """unprotect without a daemon removes the root's state, unless the root's worker still serves."""
    with open(host / "c.toml", "a") as file:
        file.write(f'[daemon]\nruntime_dir = "{host}/run"\n')
    protect(host, host / "a", host / "b")
    for name in ("a", "b"):
        fd = os.open(host / name, os.O_RDONLY)
        os.close(open_state(fd).fd)
        os.close(fd)
    before = set(host.rglob(".ciuic-state/*-*"))
    assert len(before) == 2
    worker = worker_socket(host / "run", str(host / "b"))
    worker.parent.mkdir(exist_ok=True)
    worker.touch()
    assert protect(host, host / "a", host / "b", option="unprotect").exit_code == 0
    left = set(host.rglob(".ciuic-state/*-*"))
    assert len(left) == 1
    assert left < before


def test_name_that_no_configuration_can_carry(host: Path) -> None:
    """A directory whose name is not UTF-8 cannot be a root, and protect says why."""
    path = os.fsencode(host) + b"/\xff"
    os.mkdir(path)
    result = protect(host, os.fsdecode(path))
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr
