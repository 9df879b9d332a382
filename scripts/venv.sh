# shellcheck shell=bash
# Sourced by train.sh, test.sh and check.sh: the virtual environment and what is installed in it.
# After `install_torch` and `install_extras EXTRA...` the programs are in "$venv/bin".
#
#   MICS_VENV   where it is (default .venv); made if missing
#   PYTHON      the interpreter that makes it (default: the first python >= 3.11 on the PATH)
#   TORCH_SPEC  the torch to install (default torch==2.13.0 where no NVIDIA GPU is seen,
#               else torch>=2.13,<2.15)
#
# Written for bash 3.2 on, which is what macOS has. Relative paths are relative to the repository.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root" || exit
venv="${MICS_VENV:-.venv}"
case "$venv" in /*) ;; *) venv="$root/$venv" ;; esac

stamp="$venv/mics_dtensor.stamp"

say() { printf '[mics] %s\n' "$*"; }

die() {
    printf '[mics] error: %s\n' "$*" >&2
    exit 2
}

sees_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

choose_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or later; name one that is"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or later on the PATH; install one, or name it: PYTHON=/path/to/python3.11 $0"
}

make_venv() {
    local python
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        die "MICS_VENV=$venv exists and is not a virtual environment; name another place"
    fi
    python="$(choose_python)"
    say "making the virtual environment $venv with $python"
    "$python" -m venv "$venv"
}

# install_torch: torch first and by itself, so that a CPU build at hand is taken and a plain range does
# not pull a CUDA build of several GB. Done once: a stamp in the environment holds what decides it.
install_torch() {
    local spec wanted
    if [ -n "${TORCH_SPEC:-}" ]; then
        spec="$TORCH_SPEC"
    elif sees_nvidia_gpu; then
        spec="torch>=2.13,<2.15"
    else
        spec="torch==2.13.0"
    fi
    make_venv
    wanted="$(echo "$spec in $root" && cat pyproject.toml)"
    [ "$(cat "$stamp/wanted" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "$stamp"
    say "installing $spec in $venv"
    "$venv/bin/python" -m pip install --quiet "$spec"
    mkdir "$stamp"
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >"$stamp/constraint.txt"
    echo "$wanted" >"$stamp/wanted"
}

# install_extras EXTRA...: this checkout with what it needs for them, torch held where it is.
install_extras() {
    local extra missing=""
    for extra in "$@"; do
        [ -e "$stamp/extra-$extra" ] || missing="${missing:+$missing,}$extra"
    done
    if [ -n "$missing" ]; then
        say "installing mics_dtensor[$missing] in $venv, $(cat "$stamp/constraint.txt") held"
        "$venv/bin/python" -m pip install --quiet --constraint "$stamp/constraint.txt" \
            --editable ".[$missing]"
        for extra in "$@"; do touch "$stamp/extra-$extra"; done
    fi
    say "environment $venv: $(cat "$stamp/constraint.txt") and mics_dtensor[$(IFS=,; echo "$*")]"
}

# Whether the installed torch can run the program: torchtitan 0.3.0 needs 2.13.
torch_runs_the_program() { ! grep -q '^torch==2\.1[12]\.' "$stamp/constraint.txt"; }
