#!/usr/bin/env bash
# Tests: sets the environment up if it is not (scripts/venv.sh), then runs pytest.
#
#   ./scripts/test.sh [pytest arguments]          e.g. ./scripts/test.sh tests/unit -k layout
#
#   MICS_EXTRAS   what is installed beside the tests (default "train plan plot"); for tests/integrations:
#                 MICS_VENV=.venv-integrations MICS_EXTRAS=integrations ./scripts/test.sh tests/integrations
#   MICS_VENV, PYTHON, TORCH_SPEC   see scripts/venv.sh
#   NGPU, CONFIG_FILE               those of scripts/train.sh: a test takes the ranks that it names
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

install_torch
if [ -n "${MICS_EXTRAS:-}" ]; then
    # shellcheck disable=SC2086  # it is several words
    install_extras $MICS_EXTRAS test
elif torch_runs_the_program; then
    install_extras train convert plan plot test
else
    say "without the program: torchtitan 0.3.0 needs torch 2.13 or later, its tests are skipped"
    install_extras convert plan plot test
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the forked ranks share the cores
set -- "$venv/bin/python" -m pytest "$@"
say "$*"
exec "$@"
