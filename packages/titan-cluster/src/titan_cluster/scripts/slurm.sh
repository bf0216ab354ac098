cd -- "$folder" || exit
if ! command -v "${titan[0]}" >/dev/null && [[ -z $image ]]; then
    echo "titan: error: ${titan[0]}: no such program on $(hostname); render the job again with --titan PROGRAM" >&2
    exit 2
fi
if [[ -n $recipe_file ]]; then
    mkdir -p -- "${recipe_file%/*}" && printf '%s' "$recipe" > "$recipe_file.$SLURM_JOB_ID" &&
        mv -- "$recipe_file.$SLURM_JOB_ID" "$recipe_file" || exit
fi
if [[ -n $image ]]; then # Slurm refuses to mount what does not exist
    if ((${#outputs[@]})); then mkdir -p -- "${outputs[@]}" || exit; fi
    for path in "${outputs[@]}" "${inputs[@]}"; do
        if [[ -e $path ]]; then mounts+=("$path:$path"); fi
    done
    printf -v joined '%s,' "${mounts[@]}"
    srun+=("--container-mounts=${joined%,}")
fi

# The machines meet on the first of them, on a port that no other job there is likely to use.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit
number=$SLURM_JOB_NUM_NODES
if ((least < number)); then number=$least:$number; fi
launch=(
    --nnodes "$number"
    --nproc-per-node "$ranks"
    --rdzv-endpoint "${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))"
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    --max-restarts "$max_restarts"
    --grace "$grace"
)
# The launchers know each other by a key of this start of the job. srun passes it on, whatever sbatch has exported.
TITAN_JOB_KEY=$(od -An -vN32 -tx1 /dev/urandom | tr -d ' \n')
export TITAN_JOB_KEY
srun+=(--export=ALL)

# Each task writes its own status: srun returns the highest one, so that a killed task would hide the reason of another.
state=$state/slurm-$SLURM_JOB_ID
mkdir -p -- "$state" && rm -f -- "$state"/status.* || exit
task="$(declare -f run)"'
    file=$1
    shift
    run "$@"
    echo "$status" > "$file.$SLURM_PROCID"
    exit "$status"'

# Slurm sends SIGTERM only to this script before the time limit (--signal=B:...). Titan then saves a checkpoint and exits.
# scancel signals the job's steps, not this script; srun itself would kill its tasks.
terminated=
trap 'terminated=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' TERM
srun --nodes="$SLURM_JOB_NUM_NODES" "${srun[@]}" \
    /bin/sh -c "$task" sh "$state/status" "${titan[@]}" "${arguments[@]}" "${launch[@]}" &
wait "$!"
status=$?
while [[ -n $terminated ]]; do # the signal interrupted the wait
    terminated=
    wait "$!"
    status=$?
done

statuses=$(cat -- "$state"/status.* 2> /dev/null)
find_status() { # the first of the tasks' statuses that is among the arguments
    local found
    for found in $statuses; do
        case " $* " in *" $found "*) status=$found && return ;; esac
    done
    return 1
}
# An elastic job that has trained to its end on enough machines is complete, whatever happened to the others.
# shellcheck disable=SC2086 # lists of numbers
if (($(grep -cx 0 <<< "$statuses") >= least)); then status=0; else find_status $final || find_status $preempted; fi

failures=$(cat -- "$state/failures" 2> /dev/null) # SLURM_RESTART_COUNT would count preemptions too
counts=
may_requeue() {
    case " 0 $final " in *" $status "*) return 1 ;; esac
    case " $preempted " in *" $status "*) return 0 ;; esac
    counts=1
    ((${failures:-0} < retries))
}
retried() { # Slurm's controller may be down for a while
    local attempt
    for attempt in {1..30}; do
        "$@" && return
        echo "titan: warning: attempt $attempt of 30 failed: $*" >&2
        sleep 10
    done
    return 1
}
if ! may_requeue; then
    rm -rf -- "$state"
    exit "$status"
fi
# A job that its user cancels, or that Slurm requeues itself, is no longer running, and must not be requeued.
if [[ $(retried squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    if [[ -n $counts ]]; then echo "$((${failures:-0} + 1))" > "$state/failures" || exit "$status"; fi
    echo "titan: the job ended with status $status, and is requeued" >&2
    retried scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
