# Sourced by scripts/demo and scripts/test: a virtual environment with the tested versions.
# Does nothing when the environment is there and neither pyproject.toml nor the constraints changed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

setup_environment() {
    local python=${PYTHON:-python3} stamp wanted
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "error: $("$python" --version) cannot run upcycle" >&2
        echo "  where: $(command -v "$python")" >&2
        echo "  fix: install Python 3.11, 3.12 or 3.13 and set PYTHON to it" >&2
        return 2
    fi
    stamp=.venv/upcycle-setup
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        echo "setting up .venv (a few minutes, once)"
        "$python" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable '.[dev]'
        echo "$wanted" >"$stamp"
    fi
}

setup_environment
