#!/usr/bin/env bash
# From a fresh Debian 12 or Ubuntu 24.04 to a car that drives: installs what is missing, builds saccade-server, starts it
# on config/server.yaml, drives the demo world over gRPC, shows the server's metrics, and stops it. Leaves a film of the
# drive and a report in a folder. Finished steps are skipped, so a second run takes seconds.
#   deploy/quickstart.sh [--seconds N] [--report DIR]     how long to drive, default 16; where to, default build/drive
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=16
report=build/drive
config=config/server.yaml
server=build/release/saccade-server

say() { printf '\n== %s\n' "$*"; }
fail() {
  echo "quickstart: $*" >&2
  exit 1
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --seconds)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--seconds needs a whole number of seconds"
      seconds=$2
      shift 2
      ;;
    --report)
      [[ -n ${2:-} ]] || fail "--report needs a folder"
      report=$2
      shift 2
      ;;
    *) fail "unknown argument $1; usage: deploy/quickstart.sh [--seconds N] [--report DIR]" ;;
  esac
done

# The value of a key in the `server` section, which is written one key per line.
address_of() { sed -n "s/^  $1: *\"\\{0,1\\}\\([^\"# ]*\\)\"\\{0,1\\}.*/\\1/p" "$config" | head -n 1; }
listen=$(address_of listen)
metrics=$(address_of metrics_listen)
[[ -n $listen && -n $metrics ]] || fail "cannot find server.listen and server.metrics_listen in $config"

port_is_taken() { (exec 3<>"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null; }

say "Packages"
deploy/setup.sh build

say "Build (release)"
mkdir -p build
if [[ ! -f build/release/build.ninja ]] && ! cmake --preset release >build/configure.log 2>&1; then
  tail -n 30 build/configure.log >&2
  fail "cmake failed; the whole output is in build/configure.log"
fi
cmake --build build/release --target saccade-server
echo "$("$server" --version) in $server"

say "Python environment"
deploy/venv.sh build/venv -e client -r deploy/demo/requirements.txt
echo "build/venv"

say "Server"
"$server" check-config --config "$config" >/dev/null
for address in "$listen" "$metrics"; do
  if port_is_taken "$address"; then
    fail "$address is already in use: stop what listens there, or change $config"
  fi
done
log=build/server.log
"$server" serve --config "$config" >"$log" 2>&1 &
pid=$!
stop() {
  kill -KILL "$pid" 2>/dev/null || true
}
trap stop EXIT
for ((tries = 0; tries < 600; ++tries)); do
  if ! kill -0 "$pid" 2>/dev/null; then
    tail -n 20 "$log" >&2
    fail "the server ended before it was ready; its log is $log"
  fi
  "$server" health --address "$listen" >/dev/null 2>&1 && break
  sleep 0.1
done
"$server" health --address "$listen" >/dev/null 2>&1 || fail "the server is not ready after 60 s; its log is $log"
echo "SERVING on $listen, metrics on http://$metrics/metrics, log in $log"

say "Driving for $seconds s"
driven=0
build/venv/bin/python deploy/demo/drive.py --address "$listen" --metrics "$metrics" --seconds "$seconds" \
  --out "$report" || driven=$?

say "Stopping"
kill -TERM "$pid"
stopped=0
wait "$pid" || stopped=$?
trap - EXIT
[[ $stopped -eq 0 ]] || fail "the server ended with exit code $stopped; its log is $log"
echo "the server drained and ended with exit code 0"
[[ $driven -eq 0 ]] || fail "the demo could not drive (exit code $driven), see above"
echo "look at $report/report.html; the film alone is $report/drive.gif"
