file=$1
shift
run "$@"
echo "$status" > "$file.$SLURM_PROCID"
exit "$status"
