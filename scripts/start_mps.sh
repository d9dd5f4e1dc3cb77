#!/usr/bin/env bash
# Start the sidecar for a Trinity config: scripts/start_mps.sh trinity.yaml
# A thin door to `mps-trainer up`; everything else is in `mps-trainer up --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/find_mps_trainer.sh"
command="$(find_mps_trainer)"
exec "$command" up "$@"
