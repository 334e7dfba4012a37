#!/usr/bin/env bash
# One process per GPU, on two nodes of eight: sbatch examples/multi_process/slurm.sh
#
# JAX reads SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID and SLURM_LOCALID, which srun sets, and gives
# each process the one GPU with the number SLURM_LOCALID. So every process must see all GPUs of its node: no
# --gpus-per-task, no --gpu-bind. The first node must be reachable from the others on the port
# 61440 + SLURM_JOB_ID % 4096, or JAX_COORDINATOR_PORT.
#
#SBATCH --job-name=jzero-digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

PYTHON=${PYTHON:-python}
CHECKPOINTS=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_ID} # on a file system that all nodes share

# SIGTERM comes to the processes 300 s before the time limit (--signal, above), and before a preemption. They end with
# status 75 when their checkpoint is complete; the job then goes back to the queue, under the same number. When one
# process ends, the others get 60 s: enough to end after it, and no hours of waiting for one that has crashed.
status=0
srun --wait=60 "$PYTHON" "$SLURM_SUBMIT_DIR/examples/multi_process/train.py" --cluster \
    --checkpoints "$CHECKPOINTS" "$@" || status=$?
if [[ $status == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
