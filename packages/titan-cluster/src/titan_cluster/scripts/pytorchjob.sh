# The operator describes a job of one process for each pod, which would be a rank of its own.
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
final=$1
preempted=$2
retries=$3
state=$4
shift 4
run "$@"
# With "restartPolicy: ExitCode" the operator replaces a pod after each status from 128 on, and after those only. It limits no
# number of them, so each pod counts its own failures in the folder of the run.
# shellcheck disable=SC3028 # Kubernetes sets it to the name of the pod
name=$HOSTNAME
failures=$(cat -- "$state/failures-$name" 2> /dev/null)
retry=
case " 0 $final " in
    *" $status "*) ;;
    *)
        case " $preempted " in
            *" $status "*) retry=1 ;;
            *)
                if [ "${failures:-0}" -lt "$retries" ] && mkdir -p -- "$state"; then
                    echo "$((${failures:-0} + 1))" > "$state/failures-$name" && retry=1
                fi
                ;;
        esac
        echo "titan: the pod ended with status $status${retry:+, and is replaced}" >&2
        ;;
esac
[ -z "$retry" ] || exit 143
rm -f -- "$state"/failures-*
[ "$status" -lt 128 ] || status=1
exit "$status"
