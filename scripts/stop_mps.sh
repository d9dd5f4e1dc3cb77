#!/usr/bin/env bash
# End the sidecar of a Trinity config, or of a run id, or all of yours: scripts/stop_mps.sh [trinity.yaml | RUN_ID]
# A thin door to `mps-trainer down`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/find_mps_trainer.sh"
command="$(find_mps_trainer)"
exec "$command" down "$@"
