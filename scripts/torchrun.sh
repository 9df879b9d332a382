#!/usr/bin/env bash
# torchrun, with one difference: SIGTERM goes to the ranks alone, so that they save and end with status 0.
#
#   scripts/torchrun.sh --nnodes 2 --node-rank 0 ... -m mics_dtensor.train --config-file X.toml
#
#   TORCHRUN   the torchrun to run (default: the one on the PATH)
#
# By itself torchrun answers a scheduler's SIGTERM by ending its ranks within 30 s, and ends with a
# traceback and status 1 even where every rank has ended well. Here it does not hear the signal; the
# ranks do, agree on a step, save a checkpoint and leave, and torchrun ends with their status.
set -uo pipefail

# Ranks that are started again (--max-restarts) get a store of their own. In the one that torchrun
# shares between attempts they find the addresses of those that are gone, and gloo waits for these.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# A process group of its own: neither a terminal's Ctrl-C nor a signal to the group of this shell
# reaches torchrun twice.
set -m
(
    trap '' TERM # inherited by torchrun, and by the ranks until the program listens
    exec "${TORCHRUN:-torchrun}" --signals-to-handle SIGINT,SIGHUP,SIGQUIT "$@"
) &
torchrun=$!

ranks() { cat "/proc/$torchrun/task/"*/children 2>/dev/null || pgrep -P "$torchrun"; }

to_ranks() {
    local rank
    for rank in $(ranks); do kill -TERM "$rank" 2>/dev/null; done
}

trap to_ranks TERM
trap 'kill -INT "$torchrun" 2>/dev/null' INT
status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do # a signal ends `wait` early
    status=0
    wait "$torchrun" || status=$?
done
exit "$status"
