#!/usr/bin/env bash
# Lint, format, types and spelling, in the environment of scripts/venv.sh. `--fix` repairs what can be.
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

case "$*" in
    "" | --fix) ;;
    *) die "check.sh takes --fix or nothing; got $*" ;;
esac

install_torch
install_extras train convert plan plot lint # mypy reads the types of what the code imports

run() {
    say "$*"
    PATH="$venv/bin:$PATH" "$@"
}

if [ "$*" = --fix ]; then
    run ruff check --fix .
    run ruff format .
fi
failed=""
run ruff check . || failed="$failed ruff-check"
run ruff format --check . || failed="$failed ruff-format"
run mypy || failed="$failed mypy"
run codespell || failed="$failed codespell"
[ -z "$failed" ] || die "failed:$failed"
say "all clean"
