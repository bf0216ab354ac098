# Completion of titan for bash.
_titan_table() {
    cat << 'TITAN_TABLE'
@TABLE@
TITAN_TABLE
}

_titan_candidates() {
    { printf '%s\n' "$@" $'\001'; _titan_table; } | awk '@AWK@'
}

_titan() {
    local line=${COMP_LINE:0:COMP_POINT} candidate current done_part files=
    local -a given
    read -r -a given <<< "$line"
    [[ $line == *[[:space:]] ]] && given+=("")
    current=${given[${#given[@]}-1]}
    # readline replaces only the part after the last of COMP_WORDBREAKS, such as = or :
    done_part=${COMP_WORDS[COMP_CWORD]}
    [[ $done_part == [=:] ]] && done_part=
    done_part=${current%"$done_part"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        if [[ $candidate == / ]]; then files=1; else COMPREPLY+=("${candidate#"$done_part"}"); fi
    done < <(_titan_candidates "${given[@]}")
    if [[ -n $files ]]; then
        compopt -o filenames 2> /dev/null
        while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done < <(compgen -f -- "${current#"$done_part"}")
    fi
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace 2> /dev/null
    return 0
}

complete -F _titan titan
