"""Tests that the changelog is put together from fragments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def collector() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collect", CHECKOUT / "changelog.d/collect.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fragments_become_the_newest_section(tmp_path: Path, collector: ModuleType) -> None:
    """Fragments become the newest section, sorted by type, and their files are removed."""
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\nIntroduction.\n\n## 0.1.0\n\n- Old.\n")
    (tmp_path / "README.md").write_text("not a fragment")
    (tmp_path / "b.added.md").write_text("New\ncommand.\n")
    (tmp_path / "a.fixed.md").write_text("Mended.")
    collector.collect(tmp_path, changelog, "0.2.0", "2026-01-02")
    assert changelog.read_text() == (
        "# Changelog\n\nIntroduction.\n\n## 0.2.0 (2026-01-02)\n\n### Fixed\n\n- Mended.\n\n### Added\n\n- New command.\n\n"
        "## 0.1.0\n\n- Old.\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CHANGELOG.md", "README.md"]


@pytest.mark.parametrize(
    ("name", "text"), [("a.broken.md", "Text."), ("a.fixed.md", " \n"), ("note.txt", "Text.")]
)
def test_a_wrong_fragment_is_named(tmp_path: Path, collector: ModuleType, name: str, text: str) -> None:
    """A wrong fragment is named, and nothing is written."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name if name.endswith(".md") else "got none"):
        collector.section(tmp_path, "0.2.0", "2026-01-02")


def test_the_fragments_that_are_here_are_right(collector: ModuleType) -> None:
    """The fragments of this checkout are valid."""
    if list((CHECKOUT / "changelog.d").glob("*.*.md")):
        collector.section(CHECKOUT / "changelog.d", "0", "2026-01-02")
