#!/usr/bin/env bash
# Makes or updates a Python environment and prints nothing when it is up to date.
#   deploy/venv.sh FOLDER PIP-ARGUMENT...     e.g. deploy/venv.sh build/venv -e client -r deploy/demo/requirements.txt
# Remade only when an argument, a requirements file or a pyproject.toml among them, or Python itself changes.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
shift
python=/usr/bin/python3
[[ -x $python ]] || python=$(command -v python3)

want=$({
  "$python" --version
  for argument in "$@"; do
    echo "$argument"
    [[ ! -f $argument ]] || cat "$argument"
    [[ ! -f $argument/pyproject.toml ]] || cat "$argument/pyproject.toml"
  done
} | sha256sum)
[[ -f $folder/.made-of && $(<"$folder/.made-of") == "$want" ]] && exit 0

echo "venv: making $folder" >&2
rm -rf "$folder"
"$python" -m venv "$folder" || {
  echo "venv: cannot make $folder (is python3-venv installed?)" >&2
  exit 1
}
log=$folder/pip.log
if ! "$folder/bin/pip" install --disable-pip-version-check --retries 3 "$@" >"$log" 2>&1; then
  tail -n 15 "$log" >&2
  echo "venv: pip could not install: $* (no network, or no access to the package index?)" >&2
  exit 1
fi
echo "$want" >"$folder/.made-of"
