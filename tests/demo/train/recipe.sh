#!/usr/bin/env bash
# The flow policy from nothing, on two cores: recipe.sh WORK FOLDER [GOLDEN]
#   WORK: frames, checkpoints, logs (4 GB). FOLDER: gets the lerobot folder. GOLDEN: its golden.{safetensors,json}.
# PYTHON names the Python of README.md. What is there already is not made again, so that it may be killed and repeated.
set -euo pipefail
cd "$(dirname "$0")/../../.."
train=tests/demo/train
work=$1 folder=$2 golden=${3:-}
python=${PYTHON:-python3}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# collect FOLDER SCRIPT ARGUMENT... : once for good
collect() {
  local out=$1
  shift
  [[ -e $out.done ]] || { "$python" "$@" && touch "$out.done"; }
}

# Frames of the noisy expert: training, low speeds, harder scenes; validation.
mkdir -p "$work"
data=$work/data
collect "$work/validation" $train/collect.py "$work/validation" 600 900000
halves=()
for half in 0 1; do
  (
    for part in 0 1; do
      collect "$work/plain$((2 * half + part))" $train/collect.py "$data/plain" 8000 \
        $((100000 + 50000 * half + 10000 * part))
    done
    collect "$work/slow$half" $train/collect.py "$data/slow" 1000 $((300000 + 10000 * half)) --slow
    collect "$work/hard$half" $train/collect.py "$data/hard" 2000 $((320000 + 10000 * half)) --hard
  ) &
  halves+=($!)
done
for half in "${halves[@]}"; do
  wait "$half"
done

# In two pieces, as the shipped policy was.
for steps in 500 1000; do
  resume=()
  [[ -e $work/run/last.pt ]] && resume=(--resume)
  "$python" $train/flow_train.py "$work/run" --steps "$steps" "${resume[@]}" --save 100 \
    --validation "$work/validation" --data "$data"/{plain,slow,hard}
done
"$python" $train/flow_export.py "$work/run" "$folder" ${golden:+--golden "$golden"}
