#!/usr/bin/env bash
# Put the engine that tests/engines compares with into .cache/engines: mlx-lm, on a CPU, 40 MB.
#
#     scripts/setup_engines.sh            # does nothing where it is there already
#
# A folder of its own, and --no-deps: what else it needs is in .venv, whose versions must not change.
# PYTHON names another interpreter than .venv's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
wanted=(mlx==0.32.4 mlx-lm==0.32.2)
[[ $(uname) == Darwin ]] || wanted+=(mlx-cpu==0.32.4)
folder=.cache/engines
if [[ -f $folder/installed && $(<"$folder/installed") == "${wanted[*]}" ]]; then
    exit
fi
mkdir -p .cache
made=$(mktemp -d .cache/engines.XXXXXX)
trap 'rm -rf "$made"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
    --target "$made" "${wanted[@]}"
echo "${wanted[*]}" >"$made/installed"
rm -rf "$folder"
"$python" -c "import os, sys; os.rename(*sys.argv[1:])" "$made" "$folder" 2>/dev/null ||
    [[ -f $folder/installed ]]  # another one was faster
