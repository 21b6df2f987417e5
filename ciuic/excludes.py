"""Exclude patterns: which paths of a root are served but not captured.

The rules are those of gitignore, byte for byte and independent of the locale: names need not be UTF-8, ``*``
and ``?`` never match ``/``, the last pattern that matches decides, ``!`` takes a path back, and nothing below
an excluded directory comes back. One rule differs: **a pattern that begins with ``/`` is an absolute path on
the host**, such as ``/tmp/*``. `effective_patterns` rewrites a root's own patterns into that form, where
``/cache`` means the top of the root. A pattern with another ``/`` inside (``logs/*.tmp``) is relative to the
root, and one without matches at any depth.

The root itself is never excluded, whatever a pattern above it says: protecting it is the more explicit wish.
The walk and the reserved state directory are left to capture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Part of the digest, so that a change of the rules counts as a change of the patterns. The second version changed
# bracket expressions alone: a digest that differs costs the next capture a comparison of the whole tree.
_RULES_VERSION = b"ciuic-excludes-1"
_BRACKET_RULES_VERSION = b"ciuic-excludes-2"
# What they mean in the C locale, because a decision must not depend on who starts a capture.
_POSIX_CLASSES = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"!-~",
    b"lower": rb"a-z",
    b"print": rb" -~",
    b"punct": rb"!-/:-@\[-`{-~",
    b"space": rb" \t\n\r\f\v",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


class _Rule(NamedTuple):
    tokens: tuple[re.Pattern[bytes] | None, ...]
    """One token for each component of the pattern; None stands for ``**``."""
    negated: bool
    dir_only: bool
    absolute: bool


class Scope(NamedTuple):
    """State of the patterns at one directory: everything needed to judge the names in it."""

    excluded: bool
    """True if the directory is excluded; nothing below it comes back."""
    states: tuple[int, ...]
    """One bit set for each rule: bit n is set if the first n tokens match the path down to here."""


class ExcludeMatcher:
    """Compiled patterns of one root; made once for each capture.

    Patterns are matched component by component (`top`, `below`, `excludes`), so that the work for a name and
    the memory for a directory do not depend on its depth. Matching whole paths let the owner of a directory
    9,000 levels deep make every name cost megabytes, and a pattern with several ``**`` cost time that grows
    with a power of the path's length.

    Args:
        root: Absolute path of the root on the host.
        patterns: The result of `effective_patterns`.

    Raises:
        ValueError: a pattern cannot match anything; the message names it.
    """

    def __init__(self, root: str | bytes | os.PathLike[str], patterns: Iterable[str | bytes] = ()) -> None:
        self._root = os.fsencode(root).strip(b"/")
        self._patterns = tuple(os.fsencode(pattern) for pattern in patterns)
        # Reversed, because the last pattern that matches decides.
        self._rules = [_compile(pattern) for pattern in reversed(self._patterns)]
        above = [name for name in self._root.split(b"/") if name]
        self._top = Scope(False, tuple(_state_of(rule, above) for rule in self._rules))
        # Last directory that `match` looked up, and its scope: callers ask about the names of a directory in
        # a row.
        self._last = (b"", self._top)

    def __bool__(self) -> bool:
        """Return whether there is any pattern; without one, nothing needs to be matched."""
        return bool(self._rules)

    @property
    def top(self) -> Scope:
        """Scope of the root, which is never excluded itself."""
        return self._top

    def below(self, scope: Scope, name: bytes) -> Scope:
        """Return the scope of the directory ``name`` in the directory of ``scope``."""
        excluded = self.excludes(scope, name, True)
        states = zip(self._rules, scope.states, strict=True)
        return Scope(excluded, tuple(_step(rule.tokens, state, name) for rule, state in states))

    def excludes(self, scope: Scope, name: bytes, is_dir: bool) -> bool:
        """Return whether ``name`` in the directory of ``scope``, or that directory, is excluded."""
        if scope.excluded:
            return True
        for rule, state in zip(self._rules, scope.states, strict=True):
            last = len(rule.tokens) - 1
            if not state >> last & 1 or (rule.dir_only and not is_dir):
                continue
            # The first rule that matches decides, because the last ones come first.
            token = rule.tokens[last]
            if token is None or token.fullmatch(name):
                return not rule.negated
        return False

    def match(self, path: bytes, is_dir: bool) -> bool:
        """Return whether ``path``, relative to the root, or a directory above it is excluded."""
        if not self._rules or not path:
            return False
        parent, _, name = path.rpartition(b"/")
        return self.excludes(self._scope_of(parent), name, is_dir)

    def _scope_of(self, directory: bytes) -> Scope:
        known, scope = self._last
        if known != directory:
            scope = self._top
            for name in directory.split(b"/") if directory else ():
                scope = self.below(scope, name)
            self._last = (directory, scope)
        return scope

    def digest(self) -> str:
        """Return 32 hexadecimal digits that differ whenever the matcher could decide differently."""
        # Importing hashlib takes 3 ms, and most commands need no digest. A capture has imported it before it
        # drops its privileges.
        import hashlib

        brackets = any(b"[" in pattern for pattern in self._patterns)
        state = hashlib.sha256(_BRACKET_RULES_VERSION if brackets else _RULES_VERSION)
        # The root's own path decides only where a pattern is absolute.
        absolute = any(rule.absolute for rule in self._rules)
        for part in (self._root if absolute else b"", *self._patterns):
            # With its length, so that two lists of patterns never have the same bytes.
            state.update(len(part).to_bytes(8, "little") + part)
        return state.hexdigest()[:32]

    def covering_pattern(self) -> str | None:
        """Return the absolute pattern that covers the whole root, which is most likely a mistake."""
        parts = self._root.split(b"/") if self._root else []
        for depth in range(1, len(parts) + 1):
            for pattern, rule in zip(reversed(self._patterns), self._rules, strict=True):
                if rule.absolute and not rule.negated and _matches(rule, parts[:depth]):
                    return os.fsdecode(pattern)
        return None


def _step(tokens: tuple[re.Pattern[bytes] | None, ...], state: int, name: bytes) -> int:
    """Return the set of matched prefixes after one more component."""
    reached = 0
    for at, token in enumerate(tokens):
        if not state >> at & 1:
            continue
        if token is None:
            # ``**`` takes this component, and may take more.
            reached |= 1 << at
        elif token.fullmatch(name):
            reached |= 1 << at + 1
    return _closed(tokens, reached)


def _closed(tokens: tuple[re.Pattern[bytes] | None, ...], state: int) -> int:
    """Add the prefixes that match because a ``**`` takes no component; the last token takes at least one."""
    # Not the last: `a/**` matches what is in `a`, and not `a` itself.
    for at in range(len(tokens) - 1):
        if state >> at & 1 and tokens[at] is None:
            state |= 1 << at + 1
    return state


def _state_of(rule: _Rule, above: Sequence[bytes]) -> int:
    """Return the state of a rule at the top of a root that lies below these directories."""
    state = _closed(rule.tokens, 1)
    for name in above if rule.absolute else ():
        state = _step(rule.tokens, state, name)
    return state


def _matches(rule: _Rule, parts: Sequence[bytes]) -> bool:
    """Return whether the rule matches the directory that these names lead to."""
    state, last = _state_of(rule, parts[:-1]), len(rule.tokens) - 1
    token = rule.tokens[last]
    return bool(state >> last & 1) and (token is None or token.fullmatch(parts[-1]) is not None)


def effective_patterns(
    root: str | os.PathLike[str], global_patterns: Iterable[str], root_patterns: Iterable[str]
) -> tuple[str, ...]:
    """Return the patterns of one root in the form and order that `ExcludeMatcher` takes.

    In a root's own patterns a leading ``/`` means the top of that root, unless the pattern spells the root's
    own path. The root's patterns come last, so that they can take back (``!``) what a global one excludes.
    """
    top = "/" + os.fspath(root).strip("/")
    return (*global_patterns, *(_anchor(top, pattern) for pattern in root_patterns))


def check_pattern(pattern: str) -> None:
    """Raise ValueError, with the reason, for a pattern that is empty or can never match."""
    if not pattern.strip():
        raise ValueError("a pattern must not be empty")
    if pattern.startswith("#"):
        raise ValueError(
            f"{pattern!r} is a comment in gitignore syntax; write \\# for a name that begins with #"
        )
    if "\0" in pattern:
        raise ValueError(f"a pattern must not contain a zero byte, got {pattern!r}")
    _compile(os.fsencode(pattern))


def escape(path: str) -> str:
    """Return a pattern that matches exactly ``path``."""
    # ! and # mean something only at the beginning; behind a backslash they stand for themselves anywhere.
    return re.sub(r"([\\*?\[\]!#])", r"\\\1", path)


def _anchor(top: str, pattern: str) -> str:
    sign, body = ("!", pattern[1:]) if pattern.startswith("!") else ("", pattern)
    if not body.startswith("/"):
        return pattern
    # Absolute already: the root is /, or its path is spelled out.
    if top == "/" or body.startswith(escape(top) + "/"):
        return pattern
    # Unescaped, as people write it: the path may have characters that mean something in a pattern.
    if body.startswith(top + "/"):
        return sign + escape(top) + body[len(top) :]
    return sign + escape(top) + body


def _compile(pattern: bytes) -> _Rule:
    body = _strip_trailing_spaces(pattern)
    negated = body.startswith(b"!")
    body = body[1:] if negated else body
    dir_only = body.endswith(b"/")
    body = body[:-1] if dir_only else body
    absolute = body.startswith(b"/")
    body = body[1:] if absolute else body
    if not body:
        raise ValueError(f"the pattern {os.fsdecode(pattern)!r} matches nothing")
    anchored = absolute or b"/" in body
    try:
        tokens = _translate(body) if anchored else (None, _component(body))
    except ValueError as error:
        raise ValueError(f"{error} in the pattern {os.fsdecode(pattern)!r}") from None
    return _Rule(tokens, negated, dir_only, absolute)


def _strip_trailing_spaces(pattern: bytes) -> bytes:
    stripped = pattern.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    # An odd number of backslashes escapes the first of these blanks.
    if len(stripped) < len(pattern) and backslashes % 2:
        stripped += b" "
    return stripped


def _translate(body: bytes) -> tuple[re.Pattern[bytes] | None, ...]:
    """Compile an anchored pattern; ``**`` alone between slashes spans directories."""
    return tuple(None if part == b"**" else _component(part) for part in body.split(b"/"))


def _component(part: bytes) -> re.Pattern[bytes]:
    return re.compile(_translate_part(part), re.DOTALL)


def _translate_part(part: bytes) -> bytes:
    """Translate one path component to a regular expression in which nothing matches ``/``."""
    source = b""
    position = 0
    while position < len(part):
        char = part[position : position + 1]
        position += 1
        if char == b"*":
            # Several stars match what one does, and would make the expression backtrack.
            if not source.endswith(b"[^/]*"):
                source += b"[^/]*"
        elif char == b"?":
            source += b"[^/]"
        elif char == b"[":
            piece, position = _translate_class(part, position)
            source += piece
        elif char == b"\\":
            if position == len(part):
                raise ValueError("a backslash must not be the last character")
            source += re.escape(part[position : position + 1])
            position += 1
        else:
            source += re.escape(char)
    return source


def _translate_class(part: bytes, position: int) -> tuple[bytes, int]:
    """Translate a bracket expression from behind its ``[``; also return the position after its ``]``."""
    # Both, as in git; POSIX has only the first.
    negated = part[position : position + 1] in (b"!", b"^")
    position += negated
    # Values, and not a regular expression of the same text: Python's brackets have another syntax.
    allowed: set[int] = set()
    first = True
    while True:
        if position >= len(part):
            raise ValueError("a [ lacks its ]")
        # A ] directly after the [ stands for itself.
        if part[position : position + 1] == b"]" and not first:
            break
        first = False
        end = part.find(b"]", position + 2) if part.startswith(b"[:", position) else -1
        # Without a colon before the next ] the [ stands for itself, as in git.
        if end > position + 2 and part[end - 1 : end] == b":":
            allowed.update(_posix_class(part[position + 2 : end - 1]))
            position = end + 1
            continue
        low, position = _class_member(part, position)
        high = low
        # A - directly before the ] stands for itself.
        if part[position : position + 1] == b"-" and part[position + 1 : position + 2] not in (b"]", b""):
            high, position = _class_member(part, position + 1)
        # As in git, which looks at the first member before it sees the range: [z-a] has a z, and no a.
        allowed.update((low, *range(low, high + 1)))
    if negated:
        allowed = set(range(256)) - allowed
    # No bracket expression matches a slash, as in fnmatch(3) with FNM_PATHNAME.
    allowed.discard(ord("/"))
    # An empty class is no valid expression: this one matches nothing.
    if not allowed:
        return rb"(?!)", position + 1
    return b"[" + b"".join(re.escape(bytes([value])) for value in sorted(allowed)) + b"]", position + 1


def _posix_class(name: bytes) -> Iterator[int]:
    if name not in _POSIX_CLASSES:
        raise ValueError("unknown [:class:]")
    members = re.compile(b"[" + _POSIX_CLASSES[name] + b"]")
    return (value for value in range(256) if members.match(bytes([value])))


def _class_member(part: bytes, position: int) -> tuple[int, int]:
    # An escape inside brackets too, as in git; in POSIX a backslash stands for itself there.
    if part[position : position + 1] == b"\\":
        position += 1
        if position >= len(part):
            raise ValueError("a [ lacks its ]")
    return part[position], position + 1
