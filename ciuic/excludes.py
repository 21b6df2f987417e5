"""Which paths of a root are served but not captured: gitignore patterns and absolute globs.

The rules are git's, byte for byte and without a locale: names need not be UTF-8, ``*`` and ``?`` never match
``/``, the last pattern that matches decides, ``!`` takes a path back, and nothing below an excluded directory
comes back. One thing differs: **a pattern that begins with ``/`` is an absolute path on the host**, such as
``/tmp/*``. ``effective_patterns`` rewrites a root's own patterns into that form, where ``/cache`` means the
top of the root. A pattern with another ``/`` inside (``logs/*.tmp``) is relative to the root, one without
matches at any depth.

The root itself is never excluded, whatever a pattern above it says: protecting it is the more explicit wish.
Leaves the walk, and the reserved state directory, to capture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_RULES_VERSION = b"ciuic-excludes-1"
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
    """One for each component of the pattern; None stands for ``**``."""
    negated: bool
    dir_only: bool
    absolute: bool


class Scope(NamedTuple):
    """What the patterns make of one directory: all that has to be known of its path to judge the names in it."""

    excluded: bool
    """Nothing below it comes back."""
    states: tuple[int, ...]
    """For each rule a set of bits: bit n is set if the first n tokens match the path down to here."""


class ExcludeMatcher:
    """The compiled patterns of one root; made once for each capture.

    Patterns are matched component by component (`top`, `below`, `excludes`): the work for a name and the memory for a directory
    do not depend on how deep it lies. Matching whole paths let the owner of a directory 9,000 levels deep make every name cost
    megabytes, and a pattern with several ``**`` time that grows with a power of the path's length.

    ``patterns`` is what ``effective_patterns`` returns. Raises ValueError, naming the pattern, for one that
    cannot match anything.
    """

    def __init__(self, root: str | bytes | os.PathLike[str], patterns: Iterable[str | bytes] = ()) -> None:
        self._root = os.fsencode(root).strip(b"/")
        self._patterns = tuple(os.fsencode(pattern) for pattern in patterns)
        self._rules = [_compile(pattern) for pattern in reversed(self._patterns)]
        above = [name for name in self._root.split(b"/") if name]
        self._top = Scope(False, tuple(_state_of(rule, above) for rule in self._rules))
        self._last = (b"", self._top)
        """The directory that `match` was asked about last: a caller asks about its names in a row."""

    def __bool__(self) -> bool:
        """Whether there is any pattern: without one, nothing needs to be asked."""
        return bool(self._rules)

    @property
    def top(self) -> Scope:
        """The scope of the root, which is never excluded itself."""
        return self._top

    def below(self, scope: Scope, name: bytes) -> Scope:
        """The scope of the directory ``name`` in the directory of ``scope``."""
        excluded = self.excludes(scope, name, True)
        states = zip(self._rules, scope.states, strict=True)
        return Scope(excluded, tuple(_step(rule.tokens, state, name) for rule, state in states))

    def excludes(self, scope: Scope, name: bytes, is_dir: bool) -> bool:
        """Whether ``name`` in the directory of ``scope`` is excluded: by the last pattern that matches, or with the directory."""
        if scope.excluded:
            return True
        for rule, state in zip(self._rules, scope.states, strict=True):
            last = len(rule.tokens) - 1
            if not state >> last & 1 or (rule.dir_only and not is_dir):
                continue
            token = rule.tokens[last]
            if token is None or token.fullmatch(name):
                return not rule.negated
        return False

    def match(self, path: bytes, is_dir: bool) -> bool:
        """Whether ``path`` (relative to the root, no leading ``/``) or a directory above it is excluded."""
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
        """32 hex digits that differ whenever the matcher could decide differently."""
        # 3 ms, and most commands need no digest. A capture has imported it before it gives up its privileges.
        import hashlib

        state = hashlib.sha256(_RULES_VERSION)
        absolute = any(rule.absolute for rule in self._rules)
        for part in (self._root if absolute else b"", *self._patterns):
            state.update(len(part).to_bytes(8, "little") + part)
        return state.hexdigest()[:32]

    def covering_pattern(self) -> str | None:
        """The absolute pattern that matches the root itself or a directory above it: likely a mistake."""
        parts = self._root.split(b"/") if self._root else []
        for depth in range(1, len(parts) + 1):
            for pattern, rule in zip(reversed(self._patterns), self._rules, strict=True):
                if rule.absolute and not rule.negated and _matches(rule, parts[:depth]):
                    return os.fsdecode(pattern)
        return None


def _step(tokens: tuple[re.Pattern[bytes] | None, ...], state: int, name: bytes) -> int:
    """The set of matched prefixes after one more component."""
    reached = 0
    for at, token in enumerate(tokens):
        if not state >> at & 1:
            continue
        if token is None:
            reached |= 1 << at  # it takes this component, and may take more
        elif token.fullmatch(name):
            reached |= 1 << at + 1
    return _closed(tokens, reached)


def _closed(tokens: tuple[re.Pattern[bytes] | None, ...], state: int) -> int:
    """With the prefixes that match because a ``**`` takes no component. The last token takes one at least."""
    for at in range(len(tokens) - 1):
        if state >> at & 1 and tokens[at] is None:
            state |= 1 << at + 1
    return state


def _state_of(rule: _Rule, above: Sequence[bytes]) -> int:
    """The state of a rule at the top of a root that lies below these directories."""
    state = _closed(rule.tokens, 1)
    for name in above if rule.absolute else ():
        state = _step(rule.tokens, state, name)
    return state


def _matches(rule: _Rule, parts: Sequence[bytes]) -> bool:
    """Whether the rule matches the directory that these names lead to."""
    state, last = _state_of(rule, parts[:-1]), len(rule.tokens) - 1
    token = rule.tokens[last]
    return bool(state >> last & 1) and (token is None or token.fullmatch(parts[-1]) is not None)


def effective_patterns(
    root: str | os.PathLike[str], global_patterns: Iterable[str], root_patterns: Iterable[str]
) -> tuple[str, ...]:
    """The patterns of one root in the form and order that ``ExcludeMatcher`` takes.

    In a root's own patterns a leading ``/`` means the top of that root, unless the pattern spells the root's
    own path. The root's patterns come last, so that they can take back (``!``) what a global one excludes.
    """
    top = "/" + os.fspath(root).strip("/")
    return (*global_patterns, *(_anchor(top, pattern) for pattern in root_patterns))


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with the reason, for a pattern that could never match or says nothing."""
    if not pattern.strip():
        raise ValueError("an empty pattern")
    if pattern.startswith("#"):
        raise ValueError(
            f"{pattern!r} is a comment in gitignore syntax; write \\# for a name that begins with #"
        )
    if "\0" in pattern:
        raise ValueError(f"a zero byte in the pattern {pattern!r}")
    _compile(os.fsencode(pattern))


def escape(path: str) -> str:
    """``path`` as a pattern that matches exactly it."""
    return re.sub(r"([\\*?\[\]!#])", r"\\\1", path)


def _anchor(top: str, pattern: str) -> str:
    sign, body = ("!", pattern[1:]) if pattern.startswith("!") else ("", pattern)
    if not body.startswith("/"):
        return pattern
    if top == "/" or body.startswith(escape(top) + "/"):
        return pattern
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
        raise ValueError(f"the pattern {os.fsdecode(pattern)!r} names nothing")
    anchored = absolute or b"/" in body
    try:
        tokens = _translate(body) if anchored else (None, _component(body))
    except ValueError as error:
        raise ValueError(f"{error} in the pattern {os.fsdecode(pattern)!r}") from None
    return _Rule(tokens, negated, dir_only, absolute)


def _strip_trailing_spaces(pattern: bytes) -> bytes:
    stripped = pattern.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    if len(stripped) < len(pattern) and backslashes % 2:
        stripped += b" "
    return stripped


def _translate(body: bytes) -> tuple[re.Pattern[bytes] | None, ...]:
    """An anchored pattern: ``**`` alone between slashes spans directories."""
    return tuple(None if part == b"**" else _component(part) for part in body.split(b"/"))


def _component(part: bytes) -> re.Pattern[bytes]:
    return re.compile(_translate_part(part), re.DOTALL)


def _translate_part(part: bytes) -> bytes:
    """One path component: nothing in it matches ``/``."""
    source = b""
    position = 0
    while position < len(part):
        char = part[position : position + 1]
        position += 1
        if char == b"*":
            if not source.endswith(b"[^/]*"):
                source += b"[^/]*"
        elif char == b"?":
            source += b"[^/]"
        elif char == b"[":
            piece, position = _translate_class(part, position)
            source += piece
        elif char == b"\\":
            if position == len(part):
                raise ValueError("nothing follows the last backslash")
            source += re.escape(part[position : position + 1])
            position += 1
        else:
            source += re.escape(char)
    return source


def _translate_class(part: bytes, position: int) -> tuple[bytes, int]:
    """The bracket expression whose ``[`` lies before ``position``, and the position after its ``]``."""
    negated = part[position : position + 1] in (b"!", b"^")
    position += negated
    allowed: set[int] = set()
    first = True
    while True:
        if position >= len(part):
            raise ValueError("a [ without its ]")
        if part[position : position + 1] == b"]" and not first:
            break
        first = False
        if part.startswith(b"[:", position):
            end = part.find(b":]", position)
            name = part[position + 2 : end]
            if end < 0 or name not in _POSIX_CLASSES:
                raise ValueError("an unknown [:class:]")
            members = re.compile(b"[" + _POSIX_CLASSES[name] + b"]")
            allowed.update(value for value in range(256) if members.match(bytes([value])))
            position = end + 2
            continue
        low, position = _class_member(part, position)
        high = low
        if part[position : position + 1] == b"-" and part[position + 1 : position + 2] not in (b"]", b""):
            high, position = _class_member(part, position + 1)
        allowed.update(range(low, high + 1))
    if negated:
        allowed = set(range(256)) - allowed
    allowed.discard(ord("/"))
    if not allowed:
        return rb"(?!)", position + 1
    return b"[" + b"".join(re.escape(bytes([value])) for value in sorted(allowed)) + b"]", position + 1


def _class_member(part: bytes, position: int) -> tuple[int, int]:
    if part[position : position + 1] == b"\\":
        position += 1
        if position >= len(part):
            raise ValueError("a [ without its ]")
    return part[position], position + 1
