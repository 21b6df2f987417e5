"""Shell completion: the code for each shell, and candidates for snapshot ids and paths inside a snapshot.

Guarantees: a completion prints nothing but candidates and never fails: where the repository cannot be read there simply
are none. A remote is asked for four seconds at most. Candidates for ids carry time and size as their description.

The code asks ``ciuic`` itself for candidates, through click's protocol. It is not click's own template, which gives a directory of a snapshot a trailing blank, does not quote names with blanks in bash,
and serves one program name a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import click
from click.shell_completion import CompletionItem

from ciuic.cli.shared import times
from ciuic.cli.shared.session import Session
from ciuic.cli.shared.slow import if_slow
from ciuic.errors import CiuicError

# Who has pressed Tab waits no longer for the store of a remote. What is cached needs no more than its logs.
_MAX_REMOTE_SECONDS: Final = 4.0
# Nobody reads more, and a directory of a snapshot may have a million names.
_MAX_CANDIDATES: Final = 500


def _session(ctx: click.Context) -> Session:
    """Return the session with the global options of the words typed so far; click runs their callbacks while completing."""
    session = ctx.find_object(Session) or Session()
    # Warnings would stand in the middle of the line that is being typed.
    session.verbosity = -1
    return session


@contextmanager
def _bounded(session: Session) -> Iterator[None]:
    """End the process, which has printed nothing then, if a remote takes too long; no key is asked for."""
    if session.remote_url is None:
        yield
        return
    session.may_ask = False
    # No exception: a thread may be waiting in the client of the store, and the end of the program for it.
    with if_slow(partial(os._exit, 0), _MAX_REMOTE_SECONDS):
        yield


def complete_snapshot(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return snapshot ids, newest first, and ``latest``."""
    from ciuic.units import human_size

    session = _session(ctx)
    try:
        with _bounded(session):
            infos = session.snapshots.list()
    except (CiuicError, OSError):
        return []
    finally:
        session.close()
    # A prefix is accepted without cs- as well.
    wanted = incomplete if incomplete.startswith("cs-") or not incomplete else "cs-" + incomplete
    items = [
        CompletionItem(
            str(info.id),
            help=" ".join([times.clock(info.time_ns), human_size(info.size_bytes), *info.tags]),
        )
        for info in infos
        if info.id.startswith(wanted)
    ]
    if infos and "latest".startswith(incomplete):
        items.append(CompletionItem("latest", help=f"now {infos[0].id}"))
    return items[:_MAX_CANDIDATES]


def complete_snapshot_path(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return directories (ending in /) and files of the snapshot that the command line names, or of the newest one."""
    session = _session(ctx)
    try:
        with _bounded(session):
            return _paths_in(session, _named_snapshot(ctx), os.fsencode(incomplete))
    except (CiuicError, OSError):
        return []
    finally:
        session.close()


def _named_snapshot(ctx: click.Context) -> str:
    # The parameter of restore, and that of show and diff.
    for key in ("snapshot", "snapshot_id"):
        value = ctx.params.get(key)
        if value:
            return str(value)
    return "latest"


def _paths_in(session: Session, snapshot: str, incomplete: bytes) -> list[CompletionItem]:
    from ciuic.cli.shared.contents import children_of

    loaded = session.snapshots.load(session.snapshots.resolve(snapshot))
    repository = session.repository_of(loaded.id)
    roots = [root.path for root in loaded.roots]
    parent = incomplete[: incomplete.rfind(b"/") + 1]
    # Above the roots there is nothing in the snapshot: offer the roots themselves.
    found = [root + b"/" for root in roots if root.startswith(incomplete)]
    if not found and parent:
        for entry in children_of(repository, loaded, parent.rstrip(b"/") or b"/"):
            path = parent + entry.name
            if path.startswith(incomplete):
                found.append(path + b"/" if entry.is_dir else path)
            if len(found) >= _MAX_CANDIDATES:
                break
    return [CompletionItem(os.fsdecode(path)) for path in found]


# `quoted` makes a name with blanks one word, nospace lets the next name follow a directory, and nosort (bash
# 4.4) keeps ids newest first. What goes wrong must not be printed into the line that is typed.
_BASH: Final = r"""_ciuic_completion() {
    local type value quoted
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                printf -v quoted %q "$value"
                COMPREPLY+=("$quoted")
                if [[ $value == */ ]]; then compopt -o nospace; fi
                ;;
        esac
    done < <(IFS=$'\n'; env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \
        _CIUIC_COMPLETE=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F _ciuic_completion ciuic ciuric
"""

# -V keeps the order of the candidates, and -U takes them although they do not begin with the word: an id may
# be typed without cs-.
_ZSH: Final = r"""#compdef ciuic ciuric

_ciuic_completion() {
    local -a plain described response
    local type key descr
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
        _CIUIC_COMPLETE=zsh_complete ${words[1]} 2>/dev/null)}")
    for type key descr in ${response}; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            plain)
                if [[ $descr == _ ]]; then plain+=("$key"); else described+=("$key:$descr"); fi
                ;;
        esac
    done
    if (( $#described )); then _describe -V unsorted described -U; fi
    # A directory of a snapshot ends in / and wants no blank behind it.
    if (( $#plain )); then compadd -U -S '' -V unsorted -a plain; fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ciuic_completion "$@"
else
    compdef _ciuic_completion ciuic ciuric
fi
"""

_FISH: Final = r"""function _ciuic_completion
    set -l command (commandline -opc)[1]
    set -l response (env _CIUIC_COMPLETE=fish_complete COMP_WORDS=(commandline -cp | string collect) \
        COMP_CWORD=(commandline -t | string collect) $command 2>/dev/null)
    for completion in $response
        set -l parts (string split -m 1 "," $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case plain
                echo $parts[2]
        end
    end
end
complete --no-files --keep-order --command ciuic --arguments "(_ciuic_completion)"
complete --no-files --keep-order --command ciuric --arguments "(_ciuic_completion)"
"""

SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
