#!/usr/bin/env bash
# Closed-loop success of the demo's policies: starts a server of its own on free loopback ports, drives, stops it.
#   deploy/demo/eval.sh [--seeds FIRST:END] [--json] ...   all groups on these seeds; the last line of the output is JSON
#   deploy/demo/eval.sh --table ...                        all settings; the table in server/kv/README.md
# --help lists all options. Builds what is missing; SACCADE_SERVER names another server.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -z ${SACCADE_SERVER:-} && ! -x build/release/saccade-server ]]; then
  deploy/setup.sh build >&2
  cmake --preset release >&2
  cmake --build build/release --target saccade-server >&2
fi
deploy/venv.sh build/venv -e client -r deploy/demo/requirements.txt >&2
exec build/venv/bin/python deploy/demo/evaluation.py "$@"
