#!/bin/bash
# A run of mcis on Slurm: starts Ray on all nodes of the allocation, and mcis on the first of them.
#
#   sbatch docs/cluster/slurm.sh
#
# Fill in FOLDER, on a file system that all nodes mount. It has photos.csv and, in mcis/, the clone with its .venv; it gets
# the workspace. Add your site's --account and --partition. Without GPUs, remove --gpus-per-node and, in the last command,
# --gpu. For an MLflow server, export MLFLOW_TRACKING_URI before sbatch. Ray's ports are fixed, so the job takes whole nodes
# (--exclusive).
#
# `scancel --batch --signal=TERM JOB` stops the run; Slurm does so a minute before the time limit (--signal). Submit the job
# again to continue the run.
#
#SBATCH --job-name=mcis
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=mcis-%j.log
set -euo pipefail

FOLDER=/FILL-ME-IN
source "$FOLDER/mcis/.venv/bin/activate"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(python -c 'import ray; print(ray.util.get_node_ip_address())')  # this script runs on the first node
export RAY_ADDRESS=$ip:6379
# Only programs of this job have the token. Without one, every user who reaches a node could run code as you.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    ray start --head --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --temp-dir="/tmp/ray-$SLURM_JOB_ID" --block &
for _ in {1..60}; do
    if ray status >/dev/null 2>&1; then break; fi
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done

# mcis waits for the GPUs of all workers (compute.wait_minutes).
mcis run "$FOLDER/photos.csv" --name first --workspace "$FOLDER/workspace" \
    --gpu compute.workers=4 &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM  # bash handles a signal only while it waits
status=0
wait "$run" || status=$?
if kill -0 "$run" 2>/dev/null; then  # the signal ended `wait`, and mcis ends in half a minute
    status=0
    wait "$run" || status=$?
fi
exit "$status"
