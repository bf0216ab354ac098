# The operator describes a job of one process for each pod, which would be a rank of its own.
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
final=$1
shift
run "$@"
# "restartPolicy: ExitCode" restarts after statuses from 128 on, and only after those.
case " 0 $final " in
    *" $status "*) [ "$status" -lt 128 ] || status=1 ;;
    *) status=143 ;;
esac
exit "$status"
