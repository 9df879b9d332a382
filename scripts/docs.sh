#!/usr/bin/env bash
# Builds the documentation into build/site; a broken link or a broken anchor is an error. Sets up an
# environment of its own if it is not there: no torch.
#
#   ./scripts/docs.sh            build
#   ./scripts/docs.sh serve      build, and serve on http://127.0.0.1:8000 while you write
#
#   MICS_DOCS_VENV   the environment (default .venv-docs); PYTHON   see scripts/venv.sh
set -euo pipefail
MICS_VENV="${MICS_DOCS_VENV:-.venv-docs}"
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

case "$*" in
    "" | serve) ;;
    *) die "docs.sh takes serve or nothing; got $*" ;;
esac

# The extra alone, without this package: its torch is not needed, the reference is read from the text.
make_venv
wanted="$("$venv/bin/python" - <<'PYTHON'
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))
PYTHON
)"
if [ "$(cat "$stamp/docs" 2>/dev/null)" != "$wanted" ]; then
    say "installing what the documentation needs in $venv"
    # shellcheck disable=SC2086  # one requirement a word
    "$venv/bin/python" -m pip install --quiet $wanted
    mkdir -p "$stamp"
    echo "$wanted" >"$stamp/docs"
fi

export NO_MKDOCS_2_WARNING=true # of mkdocs-material, about a version that is not ours
if [ "$*" = serve ]; then
    exec "$venv/bin/mkdocs" serve
fi
"$venv/bin/mkdocs" build --strict --clean
say "built in $root/build/site"
