#!/usr/bin/env bash
# Every check that runs no product code. Prints one line per check, and the output of those that fail; ends with
# "N passed, M failed".
#   tests/lint.sh [CHECK...]      default: all; names: format tidy isa shell yaml python client proto docker
# tidy and isa read the release build (tests/run.sh makes it).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

build=build/release
venv=build/test-venv
passed=0
failed=0

sources() { git ls-files --cached --others --exclude-standard -- "$@"; }

check_format() {
  local bad=0 file
  while read -r file; do
    if ! clang-format-14 --dry-run -Werror "$file" >/dev/null 2>&1; then
      echo "not formatted; run: clang-format-14 -i $file"
      bad=1
    fi
  done < <(sources '*.h' '*.cc')
  return "$bad"
}

check_tidy() { python3 tests/tidy.py "$build"; }

# Instructions of an object file that match a pattern, counted (no `grep -q`: it would end objdump early, with an error).
count_instructions() { objdump -d --no-show-raw-insn "$1" | grep -cE "$2"; } # OBJECT PATTERN

# One binary runs on every x86-64 with SSE4.2: wider instructions only in files named after them.
check_isa() {
  local bad=0 objects=0 object pattern
  while read -r object; do
    objects=$((objects + 1))
    case $(basename "$object") in
      *avx512* | *amx*) continue ;;
      *avx2*) pattern='%zmm[0-9]|%k[0-7]\b' ;;
      *) pattern='%[yz]mm[0-9]|%k[0-7]\b' ;;
    esac
    if [[ $(count_instructions "$object" "$pattern") -gt 0 ]]; then
      echo "$object holds wider instructions than its name says"
      bad=1
    fi
  done < <(find "$build/kernels" "$build/server" -name '*.o')
  [[ $objects -gt 0 ]] || {
    echo "$build is not built"
    bad=1
  }
  return "$bad"
}

check_shell() {
  local -a files
  mapfile -t files < <(
    sources '*.sh'
    sources .ci/run tests/bench/run
  )
  shellcheck "${files[@]}"
}

check_yaml() {
  local -a files
  mapfile -t files < <(sources '*.yaml' '*.yml')
  yamllint --strict -d '{extends: default, rules: {document-start: disable, line-length: {max: 120},
    comments: {min-spaces-from-content: 1}, braces: {max-spaces-inside: 1}}}' "${files[@]}"
}

check_python() {
  local -a files typed
  mapfile -t files < <(sources '*.py' ':!client/saccade/v1')
  mapfile -t typed < <(sources 'client/*.py' 'deploy/demo/*.py' tests/demo/calibrate.py tests/tidy.py tests/bench/{families,random_checkpoint}.py \
    ':!client/saccade/v1')
  # Scripts that make test data keep the notation of the papers and libraries they follow.
  "$venv/bin/ruff" check --quiet --output-format concise --config client/pyproject.toml --config 'src=["client"]' \
    --config 'lint.per-file-ignores={"tests/data/*"=["B","RUF","SIM"], "tests/golden/*"=["B","RUF","SIM"]}' "${files[@]}" &&
    MYPYPATH=client:client/examples:deploy/demo "$venv/bin/mypy" --config-file client/pyproject.toml --no-error-summary \
      --python-executable "$venv/bin/python" "${typed[@]}"
}

# The committed Python code of the contract is what generate.sh makes of proto/ (up to the compiler's own version).
check_client() {
  local out
  out=$(mktemp -d)
  client/generate.sh "$out" &&
    if protoc --version | grep -q ' 3\.21\.'; then
      diff -r --exclude=__pycache__ "$out/saccade/v1" client/saccade/v1
    fi
  local result=$?
  rm -rf "$out"
  return "$result"
}

check_proto() { (cd proto && "../$venv/bin/buf" lint); }

check_docker() { "$venv/bin/hadolint" Dockerfile; }

run() {
  local out
  if out=$("check_$1" 2>&1); then
    echo "lint: $1 passed"
    passed=$((passed + 1))
  else
    echo "lint: $1 FAILED"
    printf '%s\n' "$out" | sed 's/^/    /'
    failed=$((failed + 1))
  fi
}

[[ $# -gt 0 ]] || set -- format shell yaml python client proto docker isa tidy
deploy/venv.sh "$venv" -e client -r tests/requirements.txt || exit 1
for name in "$@"; do
  declare -F "check_$name" >/dev/null || {
    echo "lint: unknown check $name" >&2
    exit 2
  }
  run "$name"
done
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
