#!/usr/bin/env bash
# Makes the virtual environment ready: scripts/install.sh [EXTRA]
#
# Creates $VENV (default .venv) where it is missing, with $PYTHON (default python3), and installs this
# checkout in the versions of constraints.txt. Does nothing when the environment already matches.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
stamp=$venv/.installed${extra:+-$extra}

# Where from and what: a moved checkout or a changed pin installs again.
fingerprint=$({ echo "$PWD"; cat pyproject.toml constraints.txt; } | cksum)
matches() { [ "$(cat "$1" 2>/dev/null)" = "$fingerprint" ]; }
if matches "$stamp" || { [ -z "$extra" ] && matches "$venv/.installed-dev"; }; then
  exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
  advice="install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.12 before the command"
  if ! command -v "$python" >/dev/null; then
    echo "$python was not found; $advice" >&2
    exit 2
  fi
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is $("$python" -V 2>&1), which is too old; $advice" >&2
    exit 2
  fi
  echo "Creating the virtual environment $venv"
  "$python" -m venv "$venv"
fi

# torch goes first and alone, so that its pin is all that decides which build is taken.
torch=$(grep '^torch==' constraints.txt)
echo "Installing $torch, then lightning_mtrl${extra:+[$extra]} as pinned in constraints.txt (minutes, once)"
"$venv/bin/python" -m pip install --quiet "$torch"
"$venv/bin/python" -m pip install --quiet -c constraints.txt -e ".${extra:+[$extra]}"
echo "$fingerprint" >"$stamp"
