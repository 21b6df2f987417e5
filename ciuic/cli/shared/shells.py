"""The completion code for each shell. Each asks ``ciuic`` itself for candidates, through click's protocol.

Not click's own templates: those give a directory of a snapshot a trailing blank, do not quote names with blanks in bash,
and serve one program name a file.
"""

from __future__ import annotations

from typing import Final

COMPLETE_VARIABLE: Final = "_CIUIC_COMPLETE"

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
complete --no-files --command ciuic --arguments "(_ciuic_completion)"
complete --no-files --command ciuric --arguments "(_ciuic_completion)"
"""

SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
