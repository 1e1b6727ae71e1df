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
for half in 0 1; do
  (
    for part in 0 1; do
      collect "$work/plain$((2 * half + part))" $train/collect.py "$data/plain" 8000 \
        $((100000 + 50000 * half + 10000 * part))
    done
    collect "$work/slow$half" $train/collect.py "$data/slow" 1000 $((300000 + 10000 * half)) --slow
    collect "$work/hard$half" $train/collect.py "$data/hard" 2000 $((320000 + 10000 * half)) --hard
  ) &
done
wait

# learn STEPS ARGUMENT... : goes on where it was
learn() {
  local steps=$1 resume=()
  shift
  [[ -e $work/run/last.pt ]] && resume=(--resume)
  "$python" $train/flow_train.py "$work/run" --steps "$steps" "${resume[@]}" --save 100 \
    --validation "$work/validation" --data "$data"/{plain,slow,hard} "$@"
}

first=${FIRST:-1000} all=${ALL:-2200} decay=${DECAY:-800}
if [[ ! -e $work/first.done ]]; then
  learn "$first"
  touch "$work/first.done"
fi
# Where the policy goes, the expert labels; these count double.
for half in 0 1; do
  (
    collect "$work/driven$half" $train/flow_drive.py "$work/run" collect "$data/driven" 1500 $((200000 + 10000 * half))
    collect "$work/driven_hard$half" $train/flow_drive.py "$work/run" collect "$data/driven_hard" 1500 \
      $((400000 + 10000 * half)) --hard
  ) &
done
wait
learn "$all" --decay "$decay" --more "$data"/{driven,driven_hard}
"$python" $train/flow_export.py "$work/run" "$folder" ${golden:+--golden "$golden"}
