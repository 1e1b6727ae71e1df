#!/usr/bin/env bash
# Instructions of the core's hot paths under callgrind, against those in core_counts.txt: a regression fails without a clock.
#   core_counts.sh BINARY COMPILER             exit 0: within the tolerance; 1: not; 77: not comparable here (skipped)
#   core_counts.sh BINARY COMPILER --update    writes core_counts.txt anew
# COMPILER is what BINARY was built with, for example "GNU 12": another one makes other instructions.
set -euo pipefail
binary=$1
compiler=$2
expected=$(dirname "$0")/core_counts.txt
tolerance=10 # percent: what another minor version of compiler or library may differ by

command -v valgrind >/dev/null || {
  echo "core_counts: valgrind is not installed"
  exit 77
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# One run per path: callgrind counts between the entry of the named function and its return, 50 times.
count() { # FUNCTION
  valgrind --tool=callgrind --callgrind-out-file="$work/$1" --collect-atstart=no --toggle-collect="$1" "$binary" \
    >/dev/null 2>"$work/log" || {
    cat "$work/log" >&2
    exit 1
  }
  awk '/^(summary|totals):/ { total = $2 } END { printf "%d\n", total / 50 }' "$work/$1"
}

declare -A counts
for path in CountedStepPlan CountedStepDone CountedBlocks CountedLookup; do counts[$path]=$(count "$path"); done

if [[ ${3:-} == --update ]]; then
  {
    echo "# Instructions of one call, by core_counts.sh --update. See core_counts.cc for what each does."
    echo "compiler $compiler"
    for path in "${!counts[@]}"; do echo "$path ${counts[$path]}"; done | sort
  } >"$expected"
  cat "$expected"
  exit 0
fi

made_by=$(sed -n 's/^compiler //p' "$expected")
if [[ $made_by != "$compiler" ]]; then
  echo "core_counts: counted with $made_by, this build is by $compiler"
  exit 77
fi
status=0
while read -r path wanted; do
  got=${counts[$path]}
  verdict=ok
  if ((got * 100 > wanted * (100 + tolerance))); then
    verdict="MORE than $tolerance % above"
    status=1
  elif ((got * 100 < wanted * (100 - tolerance))); then
    verdict="more than $tolerance % below: run this with --update"
    status=1
  fi
  printf '%-16s %8d instructions, stored %8d: %s\n' "$path" "$got" "$wanted" "$verdict"
done < <(grep '^Counted' "$expected")
exit "$status"
