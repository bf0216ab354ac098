#compdef titan
# Completion of titan for zsh.
_titan_table() {
    cat << 'TITAN_TABLE'
@TABLE@
TITAN_TABLE
}

_titan_candidates() {
    { print -rl -- "$@" $'\001'; _titan_table } | awk '@AWK@'
}

_titan() {
    local line name files= nospace=
    local -a names described
    for line in "${(@f)$(_titan_candidates "${(@)words[1,CURRENT]}")}"; do
        [[ -z $line ]] && continue
        if [[ $line == / ]]; then files=1; continue; fi
        name=${line%%$'\t'*}
        [[ $name == --*=* ]] && name=${name#*=}
        [[ $name == *. ]] && nospace=1
        names+=("$name")
        described+=("${(r:32:)name} ${line#*$'\t'}")
    done
    [[ ${words[CURRENT]} == --*=* ]] && compset -P '*='
    if (( ${#names} )); then
        if [[ -n $nospace ]]; then compadd -S '' -l -d described -a names; else compadd -l -d described -a names; fi
    fi
    [[ -n $files ]] && _files
    return 0
}

if [[ ${funcstack[1]} == _titan ]]; then _titan "$@"; else compdef _titan titan; fi
