"""`ciuic config`: the values in force, mistakes, and conversion from the flat format to TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ciuic.cli.app import cli


def ciuic(*arguments: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli, list(arguments), **kwargs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ciuic.toml"
    path.write_text('[schedule]\ninterval = "2h"\n')
    return path


def test_show_names_the_origin_of_each_value(file: Path) -> None:
    """Each value is shown with its origin: a line of the file, an option, a default."""
    document = json.loads(
        ciuic("--config", str(file), "--repo", "/some/where", "config", "show", "--json").stdout
    )
    values = {row["key"]: (row["value"], row["origin"]) for row in document["values"]}
    assert document["config"] == str(file)
    assert values["schedule.interval"] == ("2h", f"{file}:2")
    assert values["retention.keep_last"] == ("3", "default")
    assert values["repository.path"] == ("/some/where", "option --repo")


def test_check_names_line_and_nearest_key(tmp_path: Path) -> None:
    """A typing error is named with file, line and the nearest key, with exit code 2."""
    path = tmp_path / "c.toml"
    path.write_text('[schedule]\n\nintervall = "2h"\n')
    result = ciuic("--config", str(path), "config", "check")
    assert result.exit_code == 2
    assert f"{path}:3" in result.stderr
    assert "schedule.interval" in result.stderr


def test_check_lists_every_mistake_at_once(tmp_path: Path) -> None:
    """All mistakes are reported in one run, in JSON with severity, file and line."""
    path = tmp_path / "c.toml"
    path.write_text('[schedule]\ninterval = "2 parsecs"\n[retention]\nkeep_last = -1\n')
    result = ciuic("config", "check", str(path), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["valid"]) == (2, False)
    assert [(problem["severity"], problem["line"]) for problem in document["problems"]] == [
        ("error", 2),
        ("error", 4),
    ]


def test_check_looks_at_the_places(tmp_path: Path) -> None:
    """A root that does not exist is found by check, with the exit code that the daemon would give."""
    path = tmp_path / "c.toml"
    path.write_text(f'[repository]\npath = "{tmp_path}/r"\n[[root]]\npath = "{tmp_path}/missing"\n')
    result = ciuic("config", "check", str(path))
    assert result.exit_code == 3
    assert f"{tmp_path}/missing" in result.stderr


def test_check_of_a_good_file(file: Path) -> None:
    """Checking a file without mistakes succeeds."""
    (file.parent / "root").mkdir()
    roots = f'[repository]\npath = "{file.parent}/repo"\n[[root]]\npath = "{file.parent}/root"\n'
    file.write_text(file.read_text() + roots)
    result = ciuic("config", "check", str(file))
    assert (result.exit_code, result.stdout) == (0, f"{file}: fine\n"), result.stderr


def test_convert_keeps_the_meaning(tmp_path: Path) -> None:
    """The TOML that convert prints has the same values as the flat file."""
    flat = tmp_path / "ciuric.conf"
    flat.write_text("snapshot_interval = 30m\nretention_policy = 14d\nexclude_patterns = *.tmp, /dev/*\n")
    toml = tmp_path / "new.toml"
    result = ciuic("config", "convert", str(flat))
    assert result.exit_code == 0
    toml.write_text(result.stdout)

    def values(path: Path) -> dict[str, str]:
        document = json.loads(ciuic("--config", str(path), "config", "show", "--json").stdout)
        return {row["key"]: row["value"] for row in document["values"]}

    assert values(toml) == values(flat)


def test_missing_and_forbidden_files(tmp_path: Path) -> None:
    """A file named by an option must exist."""
    result = ciuic("--config", str(tmp_path / "none.toml"), "config", "show")
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


def test_broken_configuration_does_not_stop_reading_with_repo(tmp_path: Path) -> None:
    """Commands that only read ignore a configuration with mistakes when --repo is given."""
    path = tmp_path / "c.toml"
    path.write_text("nonsense = [\n")
    result = ciuic("--config", str(path), "--repo", str(tmp_path / "nowhere"), "list")
    assert result.exit_code == 3


@pytest.mark.parametrize("name", ["ciuric.conf", "ciuic.toml"])
def test_check_says_that_nothing_is_protected(tmp_path: Path, name: str) -> None:
    """A file that names no root is valid, and check says that nothing is protected and which key adds one."""
    path = tmp_path / name
    path.write_text("snapshot_interval = 1h\n" if name.endswith(".conf") else '[schedule]\ninterval = "1h"\n')
    result = ciuic("config", "check", str(path))
    assert result.exit_code == 0, result.stderr
    assert "no directory is named to be protected" in result.stderr
    assert ("protected_directories" in result.stderr) == name.endswith(".conf")
    assert ": fine" not in result.stdout


@pytest.mark.parametrize("name", ["ciuic.toml", "alert.sh"])
def test_examples_are_at_hand(name: str) -> None:
    """The installed program prints the examples of the documentation byte by byte."""
    shipped = Path(__file__).parents[4] / "etc" / name
    assert ciuic("config", "example", name).stdout == shipped.read_text()
