#!/usr/bin/env bash
# Trains: sets the environment up if it is not (scripts/venv.sh), then starts the program under torchrun
# (scripts/torchrun.sh: SIGTERM saves a checkpoint, where the run has any, and ends with status 0).
#
#   ./scripts/train.sh                                        the debug model, 4 ranks, no GPU needed
#   NGPU=8 CONFIG_FILE=train_configs/llama3_8b_2x8.toml ./scripts/train.sh --training.steps 100
#
#   NGPU           ranks on this machine (default 4)
#   CONFIG_FILE    the run (default train_configs/debug.toml), relative to the repository
#   TORCHRUN_ARGS  in place of --standalone, for several machines:
#                  "--nnodes 2 --node-rank 0 --rdzv-backend c10d --rdzv-endpoint host:29500"
#   MICS_VENV, PYTHON, TORCH_SPEC   see scripts/venv.sh
#   --section.key value             overrides of the file, passed through
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

ranks="${NGPU:-4}"
config="${CONFIG_FILE:-train_configs/debug.toml}"
case "$ranks" in
    "" | *[!0-9]* | 0*) die "NGPU=$ranks is not a number of ranks; give 1 or more" ;;
esac
[ -f "$config" ] || die "CONFIG_FILE=$config is not a file (relative paths start at $root)"

install_torch
torch_runs_the_program || die "TORCH_SPEC=${TORCH_SPEC:-}: the program needs torch 2.13 or later"
install_extras train

if ! sees_nvidia_gpu; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the ranks share the cores
fi
# shellcheck disable=SC2086  # TORCHRUN_ARGS is several words
set -- ${TORCHRUN_ARGS:---standalone} --nproc-per-node "$ranks" \
    -m mics_dtensor.train --config-file "$config" "$@"
say "torchrun $*"
export TORCHRUN="$venv/bin/torchrun"
exec "$root/scripts/torchrun.sh" "$@"
