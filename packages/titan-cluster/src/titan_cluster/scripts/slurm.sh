cd -- "$folder" || exit
if ! command -v "${titan[0]}" >/dev/null && [[ -z $image ]]; then
    echo "titan: error: ${titan[0]}: no such program on $(hostname); render the job again with --titan PROGRAM" >&2
    exit 2
fi
if [[ -n $recipe_file ]]; then
    mkdir -p -- "${recipe_file%/*}" && printf '%s' "$recipe" > "$recipe_file.$SLURM_JOB_ID" &&
        mv -- "$recipe_file.$SLURM_JOB_ID" "$recipe_file" || exit
fi

# The machines meet on the first of them, on a port that no other job there is likely to use.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit
number=$SLURM_JOB_NUM_NODES
if ((least < number)); then number=$least:$number; fi
launch=(
    --nnodes "$number"
    --nproc-per-node "$ranks"
    --rdzv-backend c10d
    --rdzv-endpoint "${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))"
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    --max-restarts "$max_restarts"
    --grace "$grace"
)

# Slurm sends SIGTERM only to this script before the time limit (--signal=B:...). Titan then saves a checkpoint and exits.
# scancel signals the job's steps, not this script; srun itself would kill its tasks.
terminated=
trap 'terminated=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' TERM
srun --nodes="$SLURM_JOB_NUM_NODES" "${srun[@]}" "${titan[@]}" "${arguments[@]}" "${launch[@]}" &
wait "$!"
status=$?
while [[ -n $terminated ]]; do # the signal interrupted the wait
    terminated=
    wait "$!"
    status=$?
done

# A job that its user cancels, or that Slurm requeues itself, is no longer running, and must not be requeued.
may_requeue() {
    case " 0 $final " in *" $status "*) return 1 ;; esac
    case " $preempted " in *" $status "*) return 0 ;; esac
    ((${SLURM_RESTART_COUNT:-0} < requeues))
}
if may_requeue && [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    echo "titan: the job ended with status $status, and is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
