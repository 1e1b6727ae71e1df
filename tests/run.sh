#!/usr/bin/env bash
# Installs what is missing, builds, checks and tests everything. Ends with a table of what took how long, then "N passed,
# M failed", and exits 0 only when nothing failed. Finished work is not repeated.
#   tests/run.sh                  lint, build, unit to end-to-end tests
#   tests/run.sh --no-lint        without the checks of tests/lint.sh
#   tests/run.sh --sanitize       instead: the tests under the address and undefined-behaviour sanitizers, up to the real
#                                 server with real clients, and under the thread sanitizer
#   tests/run.sh --fuzz [SECONDS] instead: fuzzes every parser of outside bytes, the cache and the scheduler, SECONDS each
#                                 (default 60), one on every core
#   tests/run.sh --all            all three, one after the other
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

passed=0
failed=0
failures=()

# CPU seconds of this script and all that it waited for.
cpu_seconds() { awk '{ printf "%.0f", ($14 + $15 + $16 + $17) / 100 }' "/proc/$$/stat"; }

# A new stage begins, and the one before is over.
stages=()
stage=
say() {
  printf '\n== %s\n' "$*"
  end_stage
  stage=$* stage_began=$SECONDS stage_cpu=$(cpu_seconds)
}
end_stage() {
  [[ -z $stage ]] ||
    stages+=("$(printf '%7d %7d  %s' $((SECONDS - stage_began)) $(($(cpu_seconds) - stage_cpu)) "$stage")")
  stage=
}
print_stages() {
  end_stage
  printf '\nseconds     cpu  stage\n'
  printf '%s\n' "${stages[@]}"
  printf '%7d %7d  all\n' "$SECONDS" "$(cpu_seconds)"
}
fail() {
  echo "run: $*" >&2
  print_stages
  echo "$passed passed, $((failed + 1)) failed"
  exit 1
}

# Counts what ctest reports: "95% tests passed, 2 tests failed out of 40", and the names of those that failed.
run_ctest() { # BUILD-FOLDER ARGUMENT...
  local folder=$1 log=$1/ctest.log line
  shift
  ctest --test-dir "$folder" --output-on-failure --timeout 900 -j "$(nproc)" "$@" 2>&1 | tee "$log"
  line=$(grep -E '^[0-9]+% tests passed, [0-9]+ tests? failed out of [0-9]+' "$log") || {
    failed=$((failed + 1))
    failures+=("ctest in $folder ran no test")
    return
  }
  local bad total
  bad=$(sed -E 's/.*passed, ([0-9]+) tests? failed.*/\1/' <<<"$line")
  total=$(sed -E 's/.*out of ([0-9]+).*/\1/' <<<"$line")
  passed=$((passed + total - bad))
  failed=$((failed + bad))
  [[ $bad -eq 0 ]] || mapfile -t -O "${#failures[@]}" failures < <(
    sed -n '/^The following tests FAILED:/,$p' "$log" | grep -E '^[[:space:]]+[0-9]+ - '
  )
}

# Counts what pytest reports: "3 failed, 40 passed, 1 skipped in 12.3s".
run_pytest() { # BUILD-FOLDER FOLDER...
  local server=$PWD/$1/saccade-server log=$1/pytest.log good bad
  shift
  SACCADE_SERVER=$server build/test-venv/bin/python -m pytest -q -rfE "$@" 2>&1 | tee "$log"
  good=$(tail -n 3 "$log" | grep -oE '[0-9]+ passed' | grep -oE '[0-9]+' || echo 0)
  bad=$(tail -n 3 "$log" | grep -oE '[0-9]+ (failed|error)' | grep -oE '[0-9]+' | paste -sd+ | sed 's/^$/0/')
  bad=$((bad))
  [[ $((good + bad)) -gt 0 ]] || bad=1 # it did not start
  passed=$((passed + good))
  failed=$((failed + bad))
  [[ $bad -eq 0 ]] || failures+=("pytest $*: see $log")
}

configure_and_build() { # PRESET TARGET...
  local preset=$1
  shift
  [[ build/$preset/build.ninja -nt CMakePresets.json ]] || cmake --preset "$preset" || fail "cmake failed for $preset"
  cmake --build "build/$preset" ${1:+--target "$@"} || fail "the $preset build failed"
}

# The test executables of some folders under tests/.
tests_in() { # FOLDER...
  local folder file
  for folder in "$@"; do
    for file in tests/"$folder"/*_test.cc; do
      [[ ! -f $file ]] || basename "$file" .cc
    done
  done
}

# promtool alone, without the service that its package would start.
unpack_promtool() {
  command -v promtool >/dev/null || [[ -x build/tools/usr/bin/promtool ]] || {
    mkdir -p build/tools &&
      (cd build/tools && apt-get -qq download prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb) ||
      echo "run: cannot download promtool: its check is skipped" >&2
  }
  PATH=$PATH:$PWD/build/tools/usr/bin
}

finish() {
  local name
  print_stages
  for name in "${failures[@]}"; do echo "FAILED: $name"; done
  echo "$passed passed, $failed failed"
  [[ $failed -eq 0 ]]
  exit
}

make_venv() {
  deploy/venv.sh build/test-venv -e client -r tests/requirements.txt || fail "the Python environment could not be made"
}

install_clang() {
  deploy/setup.sh install clang-14 libclang-rt-14-dev || fail "the packages could not be installed"
}

run_tests() {
  say "Build (release)"
  configure_and_build release
  say "Python environment"
  make_venv
  unpack_promtool

  if [[ $lint -eq 1 ]]; then
    say "Lint"
    tests/lint.sh | tee build/lint.log
    passed=$((passed + $(grep -cE '^lint: [a-z]+ passed$' build/lint.log)))
    failed=$((failed + $(grep -cE '^lint: [a-z]+ FAILED$' build/lint.log)))
    mapfile -t -O "${#failures[@]}" failures < <(grep -E '^lint: [a-z]+ FAILED$' build/lint.log)
    grep -qE '^[0-9]+ passed, [0-9]+ failed$' build/lint.log || fail "lint did not finish"
  fi

  say "C++ tests"
  run_ctest build/release
  say "Python tests"
  run_pytest build/release client/tests tests/e2e
}

run_sanitized() {
  local -a targets
  install_clang
  make_venv
  unpack_promtool
  say "Build (address and undefined-behaviour sanitizers)"
  mapfile -t targets < <(tests_in unit kv sim rpc)
  configure_and_build asan "${targets[@]}" saccade-server
  export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
  say "C++ tests (address and undefined-behaviour sanitizers)"
  run_ctest build/asan -R '^(unit|kv|sim|rpc)\.'
  say "End-to-end tests (address and undefined-behaviour sanitizers)"
  run_pytest build/asan tests/e2e

  # The system's gRPC is not instrumented: the thread sanitizer does not see how it hands a call from thread to
  # thread. What the rpc tests do on a transport of their own instead needs no gRPC to be judged.
  say "Build (thread sanitizer)"
  mapfile -t targets < <(tests_in unit kv sim)
  configure_and_build tsan "${targets[@]}" session_core_test session_rates_test engine_turns_test transport_test
  export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
  say "C++ tests (thread sanitizer)"
  run_ctest build/tsan -R '^(unit|kv|sim)\.|^rpc\.(session_core|session_rates|engine_turns|transport)_test'
}

# New inputs stay in build/; seeds come from files that the repository has anyway, or are what earlier runs found.
fuzz_one() { # NAME
  local out=build/asan/fuzz/$1
  mkdir -p "$out/corpus"
  "build/asan/tests/fuzz/$1" -max_total_time="$fuzz_seconds" -timeout=25 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$out/" "$out/corpus" "tests/fuzz/seeds/$1"/ >"$out/log" 2>&1
}

run_fuzzers() {
  local source name
  local -A running=()
  install_clang
  say "Build (fuzzers)"
  configure_and_build asan fuzzers
  say "Fuzzing, $fuzz_seconds s each"
  for source in tests/fuzz/*_fuzz.cc; do
    name=$(basename "$source" .cc)
    fuzz_one "$name" &
    running[$!]=$name
    [[ ${#running[@]} -lt $(nproc) ]] || end_fuzzer
  done
  while [[ ${#running[@]} -gt 0 ]]; do end_fuzzer; done
}

# Waits for one of `running`.
end_fuzzer() {
  local pid name log
  if wait -n -p pid; then
    name=${running[$pid]}
    passed=$((passed + 1))
  else
    name=${running[$pid]}
    failed=$((failed + 1))
    failures+=("$name: the input and the log are in build/asan/fuzz/$name/")
    tail -n 60 "build/asan/fuzz/$name/log"
  fi
  log=build/asan/fuzz/$name/log
  echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") runs, $(
    grep -oE 'cov: [0-9]+' "$log" | tail -n 1
  )"
  unset "running[$pid]"
}

modes=()
lint=1
fuzz_seconds=60
while [[ $# -gt 0 ]]; do
  case $1 in
    --no-lint) lint=0 ;;
    --sanitize) modes+=(sanitize) ;;
    --fuzz)
      modes+=(fuzz)
      if [[ ${2:-} =~ ^[1-9][0-9]*$ ]]; then
        fuzz_seconds=$2
        shift
      fi
      ;;
    --all) modes+=(test sanitize fuzz) ;;
    *) fail "unknown argument $1; see the head of tests/run.sh" ;;
  esac
  shift
done

mkdir -p build
say "Packages"
deploy/setup.sh test || fail "the packages could not be installed"
for mode in "${modes[@]:-test}"; do
  case $mode in
    test) run_tests ;;
    sanitize) run_sanitized ;;
    fuzz) run_fuzzers ;;
  esac
done
finish
