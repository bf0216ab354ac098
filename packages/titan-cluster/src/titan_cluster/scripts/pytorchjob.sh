# The operator describes a job of one process for each pod, which would be a rank of its own.
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
final=$1
shift
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
# "restartPolicy: ExitCode" restarts after statuses from 128 on, and only after those.
case " 0 $final " in
    *" $status "*) [ "$status" -lt 128 ] || status=1 ;;
    *) status=143 ;;
esac
exit "$status"
