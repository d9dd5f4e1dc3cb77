# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a virtual environment with this package in it, made once.
#
#   MPS_TRAINER_VENV          where it goes; default: .venv at the root of the repository
#   MPS_TRAINER_PYTHON        the Python (3.10 to 3.12) to make it with; default: the first that works
#   MPS_TRAINER_TORCH_INDEX   a package index for torch alone; on a machine without an NVIDIA GPU
#                             https://download.pytorch.org/whl/cpu has a build that is 3 GB smaller

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${MPS_TRAINER_VENV:-$REPO/.venv}
TORCH=torch==2.13.0

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# Prints the command of a Python that can make a virtual environment for this package.
find_python() {
  local candidate
  for candidate in ${MPS_TRAINER_PYTHON:+"$MPS_TRAINER_PYTHON"} python3.11 python3.12 python3.10 python3 python; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.10 to 3.12 with venv and ensurepip found; install one (Debian, Ubuntu: apt-get install" \
    "python3 python3-venv), or name it in MPS_TRAINER_PYTHON" >&2
  return 1
}

# install EXTRAS: venv, torch and `-e .[EXTRAS]`; does nothing when this was done for this very pyproject.toml.
install() {
  local extras=$1 want stamp="$VENV/.installed-$1" log="$VENV/install.log" python
  want=$(sha256sum <"$REPO/pyproject.toml")"$TORCH ${MPS_TRAINER_TORCH_INDEX:-} $REPO"
  mkdir -p "$VENV"
  exec 9>"$VENV/.lock"
  flock 9 # two scripts may be started at once; the second finds the work done
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    say "environment $VENV is up to date"
    exec 9>&-
    return
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python)
    say "making a virtual environment in $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  say "installing $TORCH (a minute or two)"
  pip_install ${MPS_TRAINER_TORCH_INDEX:+--index-url "$MPS_TRAINER_TORCH_INDEX"} "$TORCH"
  say "installing mps-trainer[$extras] with Trinity-RFT, Ray and what they need (three to five minutes)"
  pip_install -e "$REPO[$extras]" "$TORCH"
  echo "$want" >"$stamp"
  say "installed"
  exec 9>&-
}

# Quiet unless it fails.
pip_install() {
  if ! "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >"$log" 2>&1 </dev/null 9>&-; then
    tail -n 25 "$log" >&2
    echo "pip install $* failed; the whole output is in $log" >&2
    return 1
  fi
}
