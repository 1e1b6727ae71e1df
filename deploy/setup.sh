#!/usr/bin/env bash
# Installs what is missing, with apt, asking nothing. Does nothing when all is there.
#   deploy/setup.sh build           what building, testing and running from source needs
#   deploy/setup.sh test            the same, and what the lint checks and the tests of deploy/ need
#   deploy/setup.sh install NAME... these packages
#   deploy/setup.sh libraries-of BINARY...   prints the packages of the shared libraries of a binary (installs nothing)
# Package names are those of Debian 12 and Ubuntu 24.04. Runs as root, or as a user whose sudo needs no password.
set -euo pipefail

build_packages=(
  build-essential ca-certificates cmake git ninja-build pkg-config protobuf-compiler protobuf-compiler-grpc
  libabsl-dev libcli11-dev libdnnl-dev libgmock-dev libgrpc++-dev libgtest-dev libjpeg-dev libpng-dev libprotobuf-dev
  libspdlog-dev libssl-dev libturbojpeg0-dev libxxhash-dev libyaml-cpp-dev nlohmann-json3-dev openssl
  prometheus-cpp-dev python3 python3-venv
)
# Not the package prometheus: it would start a server on port 9090, now and at every boot. tests/run.sh unpacks its
# prometheus and promtool under build/ instead. The package systemd starts nothing: its systemd-analyze is wanted.
test_packages=(clang-format-14 clang-tidy-14 python3-yaml shellcheck systemd valgrind yamllint)
# A real browser looks at the report. Ubuntu has it as a snap only: there that test is skipped.
browser_packages=(chromium fonts-dejavu-core)

say() { echo "setup: $*" >&2; }
fail() {
  say "$*"
  exit 1
}

missing_of() {
  local name
  for name in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || echo "$name"
  done
}

as_root() {
  if [[ $(id -u) -eq 0 ]]; then
    "$@"
  else
    sudo -n -- "$@"
  fi
}

install_missing() {
  local -a missing
  mapfile -t missing < <(missing_of "$@")
  if [[ ${#missing[@]} -eq 0 ]]; then
    say "all $# packages are installed"
    return
  fi
  if [[ $(id -u) -ne 0 ]] && ! sudo -n true 2>/dev/null; then
    fail "not root, and sudo is absent or asks for a password. Run this once as root: apt-get install -y ${missing[*]}"
  fi
  say "installing ${#missing[@]} packages: ${missing[*]}"
  local -a apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
  # Output is shown only when it matters: a log is kept until the end.
  local log
  log=$(mktemp)
  if ! as_root "${apt[@]}" update >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "apt-get update failed (no network, or a broken package source?)"
  fi
  if ! as_root "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "apt-get install failed; on Ubuntu the source 'universe' must be enabled. Wanted: ${missing[*]}"
  fi
  rm -f "$log"
  mapfile -t missing < <(missing_of "$@")
  [[ ${#missing[@]} -eq 0 ]] || fail "still missing after apt-get install: ${missing[*]}"
  say "done"
}

# dpkg knows a library by /usr/lib/... or by /lib/..., whatever ldd says.
libraries_of() {
  local path
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | while read -r path; do
    path=$(realpath "$path")
    { dpkg-query -S "$path" || dpkg-query -S "${path#/usr}"; } 2>/dev/null || fail "no package owns $path"
  done | sed 's/:.*//' | sort -u
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  fail "this needs apt (Debian 12, Ubuntu 24.04). Elsewhere install by hand what these provide: ${build_packages[*]}"
fi

case ${1:-build} in
  build) install_missing "${build_packages[@]}" ;;
  test)
    install_missing "${build_packages[@]}" "${test_packages[@]}"
    if [[ $(sed -n 's/^ID=//p' /etc/os-release) == debian ]]; then install_missing "${browser_packages[@]}"; fi
    ;;
  install)
    shift
    install_missing "$@"
    ;;
  libraries-of)
    shift
    libraries_of "$@"
    ;;
  *) fail "usage: deploy/setup.sh [build | test | install NAME... | libraries-of BINARY...]" ;;
esac
