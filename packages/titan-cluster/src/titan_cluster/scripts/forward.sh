# Run a command, forward SIGTERM to it, and set $status to its exit status.
# shellcheck disable=SC2329 # the tasks of Slurm call it
run() {
    child=
    signaled=
    trap 'signaled=1; [ -z "$child" ] || kill -TERM "$child"' TERM
    "$@" &
    child=$!
    [ -z "$signaled" ] || kill -TERM "$child" # the signal came before its number was known
    wait "$child"
    status=$?
    while [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null; do # a signal interrupted the wait
        wait "$child"
        status=$?
    done
}

