# Sourced by the doors in this folder. Prints the path of the mps-trainer command: of $MPS_TRAINER_VENV, of the
# active venv, of .venv at the root of this repository, or of PATH, whichever comes first.
find_mps_trainer() {
    local root candidate
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    for candidate in \
        "${MPS_TRAINER_VENV:+$MPS_TRAINER_VENV/bin/mps-trainer}" \
        "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/mps-trainer}" \
        "$root/.venv/bin/mps-trainer"; do
        if [[ -n "$candidate" && -x "$candidate" ]]; then
            echo "$candidate"
            return
        fi
    done
    if command -v mps-trainer; then
        return
    fi
    echo "no mps-trainer in \$MPS_TRAINER_VENV, an active venv, $root/.venv or PATH" >&2
    echo "  What to do: run scripts/quickstart.sh once, or pip install -e $root" >&2
    return 1
}
