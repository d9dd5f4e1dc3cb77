#!/usr/bin/env bash
# Every check, as CI runs them. Arguments go to pytest:  scripts/test.sh -m "not trinity" tests/transport
# The tests run in two processes (tests/support/spread.py);  scripts/test.sh -n 0  in one, in the order of the files.
set -euo pipefail
# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
install "trinity,report,dev"
cd "$REPO"
export PATH=$VENV/bin:$PATH
say "ruff check" && ruff check .
say "ruff format" && ruff format --check .
say "mypy" && mypy
say "lint-imports" && lint-imports
say "pytest" && python -m pytest -n 2 --dist loadfile "$@"
say "all checks passed"
