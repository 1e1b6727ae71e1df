#!/usr/bin/env bash
# Installs what is missing, builds, checks and tests everything. Ends with "N passed, M failed" and exits 0 only when
# nothing failed. From a clean clone about half an hour on two cores; finished work is not repeated.
#   tests/run.sh                  lint, build, unit to end-to-end tests
#   tests/run.sh --no-lint        without the checks of tests/lint.sh
#   tests/run.sh --sanitize       instead: builds and runs the tests of threads, memory and parsing under the address,
#                                 undefined-behaviour and thread sanitizers
#   tests/run.sh --fuzz [SECONDS] instead: fuzzes every parser of outside bytes, SECONDS each (default 60)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

passed=0
failed=0
failures=()

say() { printf '\n== %s\n' "$*"; }
fail() {
  echo "run: $*" >&2
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
run_pytest() { # FOLDER...
  local log=build/pytest.log good bad
  SACCADE_SERVER=$PWD/build/release/saccade-server build/test-venv/bin/python -m pytest -q -rfE "$@" 2>&1 | tee "$log"
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
  [[ -f build/$preset/build.ninja ]] || cmake --preset "$preset" || fail "cmake failed for $preset"
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
  say "Result"
  local name
  for name in "${failures[@]}"; do echo "FAILED: $name"; done
  echo "$passed passed, $failed failed"
  [[ $failed -eq 0 ]]
  exit
}

mode=all
lint=1
fuzz_seconds=60
while [[ $# -gt 0 ]]; do
  case $1 in
    --no-lint) lint=0 ;;
    --sanitize) mode=sanitize ;;
    --fuzz)
      mode=fuzz
      if [[ ${2:-} =~ ^[1-9][0-9]*$ ]]; then
        fuzz_seconds=$2
        shift
      fi
      ;;
    *) fail "unknown argument $1; see the head of tests/run.sh" ;;
  esac
  shift
done

mkdir -p build
say "Packages"
deploy/setup.sh test || fail "the packages could not be installed"

case $mode in
  sanitize)
    unpack_promtool
    mapfile -t targets < <(tests_in unit kv sim rpc)
    say "Tests under the address and undefined-behaviour sanitizers"
    configure_and_build asan "${targets[@]}"
    export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
    run_ctest build/asan -R '^(unit|kv|sim|rpc)\.'
    # The system's gRPC is not instrumented: the thread sanitizer does not see how it hands a call from thread to
    # thread. Streams are tested on a transport of the test's own instead.
    say "Tests under the thread sanitizer"
    mapfile -t targets < <(tests_in unit kv sim)
    configure_and_build tsan "${targets[@]}" session_core_test engine_turns_test
    export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
    run_ctest build/tsan -R '^(unit|kv|sim)\.|^rpc\.(session_core|engine_turns)_test'
    finish
    ;;
  fuzz)
    say "Fuzzing, $fuzz_seconds s each"
    deploy/setup.sh install clang-14 libclang-rt-14-dev || fail "the packages could not be installed"
    for source in tests/fuzz/*_fuzz.cc; do
      name=$(basename "$source" .cc)
      configure_and_build fuzz "$name"
      # New inputs stay in build/, seeds come from files that the repository has anyway.
      mkdir -p "build/fuzz/$name/corpus"
      if "build/fuzz/tests/fuzz/$name" -max_total_time="$fuzz_seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name/" "build/fuzz/$name/corpus" "tests/fuzz/seeds/$name"/; then
        passed=$((passed + 1))
      else
        failed=$((failed + 1))
        failures+=("$name: the input is in build/fuzz/$name/")
      fi
    done
    finish
    ;;
esac

say "Build (release)"
configure_and_build release
deploy/venv.sh build/test-venv -e client -r tests/requirements.txt || fail "the Python environment could not be made"
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
run_pytest client/tests tests/e2e
finish
