#!/usr/bin/env bash
# A Slurm job on AWS machines with EFA: sbatch --nodes 16 scripts/launch/slurm.sh --config-file X.toml
#
# Elsewhere than on AWS delete the block "EFA". Submit it from the checkout; one task a node starts
# torchrun, which starts the ranks.
#SBATCH --job-name=mics
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# SIGTERM to all steps three minutes before the time limit: the ranks save and end with status 0. Not
# "B:", which signals this script alone.
#SBATCH --signal=TERM@180
# A node that fails puts the job back into the queue, where it resumes from its last checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
[ -n "${SLURM_JOB_NODELIST:-}" ] || { echo "start this with sbatch --nodes N $0 --config-file X.toml" >&2; exit 2; }

# --- EFA, as AWS's documentation and its FSDP examples have it
export FI_PROVIDER=efa                # libfabric takes the EFA, never TCP in silence
export FI_EFA_USE_HUGE_PAGE=0         # with huge pages fork(), as of data loader workers, fails: "Cannot allocate memory"
export FI_EFA_SET_CUDA_SYNC_MEMOPS=0  # no synchronisation of every registered buffer: faster with FSDP
# --- NCCL
export NCCL_SOCKET_IFNAME="^docker,lo" # bootstrap over the host's own interface; the EFA carries the data
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" # INFO shows "Selected provider is efa": look once

# Slurm sorts the list by name and numbers tasks along it: SLURM_NODEID is torchrun's --node-rank, and
# the ranks of a node are consecutive, as MiCS needs. Neighbours in the network should have
# neighbouring names.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
first_host="${hosts%%$'\n'*}"
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs that share a node get two ports
export first_host port
here="${SLURM_SUBMIT_DIR:-$PWD}"
ranks="${SLURM_GPUS_ON_NODE:-8}"

# --kill-on-bad-exit: a node that is gone ends the step at once. --wait=0: no other limit.
# shellcheck disable=SC2016  # SLURM_NODEID is known in the task
exec srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 --wait=0 \
    bash -c 'exec "$0" --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$1" --master-addr "$first_host" --master-port "$port" \
        --max-restarts 0 -m mics_dtensor.train "${@:2}"' \
    "$here/scripts/torchrun.sh" "$ranks" "$@"
