#!/usr/bin/env bash
# The real Trinity-RFT with a sidecar trainer on this machine's CPU, from nothing to a report, in one command.
# Installs into .venv (scripts/venv.sh says how to change that) and writes its results to .quickstart/.
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
install "trinity,report"
exec "$VENV/bin/python" "$REPO/examples/cpu_rollout/quickstart.py" --work-dir "$REPO/.quickstart" "$@"
