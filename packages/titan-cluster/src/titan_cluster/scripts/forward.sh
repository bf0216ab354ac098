# Run a command in the place of this shell, which has something to do afterwards: set $status to its exit status.
run() {
    titan=
    terminated=
    trap 'terminated=1; [ -z "$titan" ] || kill -TERM "$titan"' TERM
    "$@" &
    titan=$!
    [ -z "$terminated" ] || kill -TERM "$titan" # the signal came before its number was known
    wait "$titan"
    status=$?
    while [ "$status" -gt 128 ] && kill -0 "$titan" 2> /dev/null; do # a signal interrupted the wait
        wait "$titan"
        status=$?
    done
}
