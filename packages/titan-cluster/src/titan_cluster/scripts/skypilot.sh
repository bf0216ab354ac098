if [[ -n $project ]]; then titan=("$PWD/.venv/bin/titan"); fi # SkyPilot starts in its copy of the project
cd -- "$folder" || exit
if [[ -n $recipe_file ]]; then # the machines share the folder
    mkdir -p -- "${recipe_file%/*}" && printf '%s' "$recipe" > "$recipe_file.$SKYPILOT_NODE_RANK" &&
        mv -- "$recipe_file.$SKYPILOT_NODE_RANK" "$recipe_file" || exit
fi
launch=(
    --nnodes "$SKYPILOT_NUM_NODES"
    --nproc-per-node "$ranks"
    --max-restarts "$max_restarts"
)
if ((SKYPILOT_NUM_NODES > 1)); then
    launch+=(
        --rdzv-endpoint "${SKYPILOT_NODE_IPS%%$'\n'*}:29400"
        --rdzv-id "$SKYPILOT_TASK_ID"
    )
fi
exec "${titan[@]}" "${arguments[@]}" "${launch[@]}"
