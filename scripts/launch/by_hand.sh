#!/usr/bin/env bash
# Several machines by hand: run this on each of them, the same line but for the first number.
#
#   scripts/launch/by_hand.sh NODE_RANK NUM_NODES HOST_OF_NODE_0 --config-file X.toml [--section.key value]
#
#   RANKS_PER_NODE   ranks on each machine (default 8)
#   PORT             of the rendezvous on node 0 (default 29500)
#   TORCHRUN         see scripts/torchrun.sh
#
# Ranks are numbered node by node in the order of NODE_RANK, which MiCS needs: give neighbours in the
# network neighbouring numbers.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ "$#" -ge 3 ] || { sed -n '2,6p' "${BASH_SOURCE[0]}" >&2; exit 2; }
node_rank="$1" num_nodes="$2" first_host="$3"
shift 3
case "$node_rank$num_nodes" in
    *[!0-9]*) echo "NODE_RANK $node_rank and NUM_NODES $num_nodes must be numbers" >&2; exit 2 ;;
esac
[ "$node_rank" -lt "$num_nodes" ] || { echo "NODE_RANK $node_rank is not below NUM_NODES $num_nodes" >&2; exit 2; }

# The static rendezvous (--master-addr) numbers nodes by --node-rank; c10d numbers them as they come.
exec "$here/torchrun.sh" --nnodes "$num_nodes" --node-rank "$node_rank" --nproc-per-node "${RANKS_PER_NODE:-8}" \
    --master-addr "$first_host" --master-port "${PORT:-29500}" -m mics_dtensor.train "$@"
