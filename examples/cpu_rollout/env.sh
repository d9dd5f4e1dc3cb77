# shellcheck shell=bash
# source examples/cpu_rollout/env.sh FOLDER
#
# For runs by hand, from the root of the repository with its environment active: the variables that the YAMLs of the
# examples and Ray's processes need where there is no GPU. FOLDER will hold all that these runs write; the tiny language
# model is made there once.

if [ -z "${1:-}" ] || [ ! -d examples/cpu_rollout ]; then
  echo "from the root of the repository: source examples/cpu_rollout/env.sh FOLDER" >&2
  return 1
fi
mkdir -p "$1"
CPU_ROLLOUT_DIR=$PWD/examples/cpu_rollout
CPU_ROLLOUT_WORK=$(cd "$1" && pwd)
CPU_ROLLOUT_MODEL=$CPU_ROLLOUT_WORK/model
TINKER_STAND_IN_DIR=$CPU_ROLLOUT_WORK/tinker
export CPU_ROLLOUT_DIR CPU_ROLLOUT_WORK CPU_ROLLOUT_MODEL TINKER_STAND_IN_DIR
export PYTHONPATH=$CPU_ROLLOUT_DIR/stand_ins:$CPU_ROLLOUT_DIR:$CPU_ROLLOUT_WORK${PYTHONPATH:+:$PYTHONPATH}
# Several of Ray's processes share few cores: one thread each. Nothing is downloaded.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_DATASETS_CACHE=$CPU_ROLLOUT_WORK/datasets
if [ ! -e "$CPU_ROLLOUT_MODEL/config.json" ]; then
  python -m cpu_rollout.tiny_model "$CPU_ROLLOUT_MODEL"
fi
