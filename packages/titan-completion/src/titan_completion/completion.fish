# Completion of titan for fish.
function __titan_table
    echo '@TABLE@'
end

function __titan_candidates
    begin
        printf '%s\n' $argv
        printf '\001\n'
        __titan_table
    end | awk '@AWK@'
end

function __titan_complete
    set -l current (commandline -ct)
    for line in (__titan_candidates (commandline -opc) "$current")
        if test "$line" = /
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end

complete -c titan -e
complete -c titan -f -a '(__titan_complete)'
