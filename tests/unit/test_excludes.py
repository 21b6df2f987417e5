"""Tests of excludes where they differ from git (absolute paths), of the root itself, digests, refusals."""

from __future__ import annotations

import pytest

from ciuic.excludes import ExcludeMatcher, check_pattern, effective_patterns, escape


def matcher(root: str, global_patterns: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> ExcludeMatcher:
    return ExcludeMatcher(root, effective_patterns(root, global_patterns, own))


def test_a_global_leading_slash_is_the_hosts_root() -> None:
    """``/data/cache`` in the global list is that one directory, and not data/cache inside the root."""
    excludes = matcher("/data", ("/data/cache", "/tmp/*"))
    assert excludes.match(b"cache", True)
    assert excludes.match(b"cache/file", False)
    assert not excludes.match(b"data/cache", True)
    assert not excludes.match(b"tmp/file", False)


def test_a_glob_may_span_the_root() -> None:
    """An absolute glob with a wildcard above the root reaches into every root it fits."""
    for root in ("/srv/one/train", "/srv/two/train"):
        assert matcher(root, ("/srv/*/train/scratch/",)).match(b"scratch", True)
    assert not matcher("/srv/one/more/train", ("/srv/*/train/scratch/",)).match(b"scratch", True)


def test_a_roots_own_leading_slash_is_the_top_of_the_root() -> None:
    """A leading slash in a root's own list is the root's top, and the root's path spelled out the same."""
    for own in ("/cache", "/srv/a[1]/cache", r"/srv/a\[1\]/cache"):
        excludes = matcher("/srv/a[1]", (), (own,))
        assert excludes.match(b"cache", True), own
        assert not excludes.match(b"deep/cache", True), own


def test_patterns_of_a_root_can_negate_global_ones() -> None:
    """The root's patterns come after the global ones and can negate them."""
    excludes = matcher("/data", ("*.log",), ("!keep.log",))
    assert excludes.match(b"deep/x.log", False)
    assert not excludes.match(b"deep/keep.log", False)


def test_the_root_itself_is_never_excluded() -> None:
    """A pattern that covers the root is reported and does not empty its snapshots."""
    excludes = matcher("/tmp/run1", ("/tmp/*",))
    assert excludes.covering_pattern() == "/tmp/*"
    assert not excludes.match(b"file", False)
    assert not excludes.match(b"", True)
    assert matcher("/data", ("/tmp/*",)).covering_pattern() is None


def test_the_file_system_root_as_a_root() -> None:
    """Absolute patterns work for the root ``/`` as well."""
    excludes = matcher("/", ("/tmp/*",))
    assert excludes.match(b"tmp/x", False)
    assert not excludes.match(b"tmp", True)


def test_digest_changes_with_patterns_order_and_boundary() -> None:
    """Other patterns, another order or another boundary change the digest; the same patterns do not."""
    lists = [(), ("a",), ("a", "b"), ("b", "a"), ("ab",), ("a/",), ("/x",)]
    digests = {matcher("/data", patterns).digest() for patterns in lists}
    assert len(digests) == len(lists)
    assert matcher("/data", ("a", "b")).digest() == matcher("/data", ("a", "b")).digest()
    assert matcher("/other", ("a",)).digest() == matcher("/data", ("a",)).digest()
    assert matcher("/other", ("/x",)).digest() != matcher("/data", ("/x",)).digest()


def test_digest_without_brackets_is_that_of_earlier_versions() -> None:
    """A new version, which matches brackets in another way, has only roots with such patterns compared anew."""
    assert matcher("/data", ("*.tmp", "cache/")).digest() == "6b744c82ecbff098d8852aa343c3a915"
    assert matcher("/data", ("[z-a]",)).digest() != "018c7676ba00f614b838b1710ec3e749"


@pytest.mark.parametrize("pattern", ["", "  ", "#x", "[a", "a\\", "/", "!", "!/", "[[:nope:]]", "a\0b"])
def test_a_pattern_that_cannot_match_is_refused(pattern: str) -> None:
    """A pattern that cannot match is an error that names it."""
    with pytest.raises(ValueError, match=r"pattern|comment"):
        check_pattern(pattern)


def test_escape_makes_a_literal() -> None:
    """An escaped name matches itself alone."""
    name = "we*ird[1]?!#\\x"
    excludes = matcher("/d", (escape(name),))
    assert excludes.match(name.encode(), False)
    assert not excludes.match(b"weXird1y!#\\x", False)
