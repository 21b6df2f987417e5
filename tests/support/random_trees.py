"""Random changes to a small directory tree, for property tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hypothesis import strategies as st
from support.restoring import write

NAMES = ("a", "b", "c/d", "c/e/f", "g/h", "c", "g", "i")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES), st.binary(max_size=12_000)),
        st.tuples(st.just("overwrite"), st.sampled_from(NAMES), st.integers(0, 9000)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
        st.tuples(st.just("mkdir"), st.sampled_from(NAMES), st.none()),
        st.tuples(st.just("symlink"), st.sampled_from(NAMES), st.sampled_from(("x", "y"))),
        st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
        st.tuples(st.just("chmod"), st.sampled_from(NAMES), st.sampled_from((0o600, 0o755))),
        st.tuples(st.just("xattr"), st.sampled_from(NAMES), st.sampled_from((b"1", b"2"))),
        st.tuples(st.just("utime"), st.sampled_from(NAMES), st.integers(1, 10**18)),
    ),
    max_size=12,
)


def play(root: Path, steps: list[tuple[str, str, object]]) -> None:
    """Carry out the steps that are possible."""
    for what, name, argument in steps:
        path = root / name
        try:
            if what == "write":
                write(path, argument)  # type: ignore[arg-type]
            elif what == "overwrite":
                with open(path, "r+b") as file:
                    file.seek(argument)  # type: ignore[arg-type]
                    file.write(b"over")
            elif what == "remove":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            elif what == "mkdir":
                path.mkdir(parents=True)
            elif what == "symlink":
                path.symlink_to(str(argument))
            elif what == "link":
                os.link(root / str(argument), path, follow_symlinks=False)
            elif what == "chmod":
                os.chmod(path, argument)  # type: ignore[arg-type]
            elif what == "xattr":
                os.setxattr(path, "user.x", argument)  # type: ignore[arg-type]
            else:
                os.utime(path, ns=(1, argument))  # type: ignore[arg-type]
        except OSError:
            # The random step does not fit the existing files.
            continue
