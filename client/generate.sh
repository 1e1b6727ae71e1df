#!/usr/bin/env bash
# Regenerates saccade/v1 from the contract. The result is committed, so that installing the client needs no protoc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
plugin=$(command -v grpc_python_plugin) || { echo "generate.sh: grpc_python_plugin not found (Debian: protobuf-compiler-grpc)" >&2; exit 1; }
mkdir -p "$out/saccade/v1"
protoc -I "$here/../proto" --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  --plugin=protoc-gen-grpc_python="$plugin" "$here"/../proto/saccade/v1/*.proto
touch "$out/saccade/v1/__init__.py"
# A contract file without a service has an empty gRPC module; nobody imports it.
for module in "$out"/saccade/v1/*_pb2_grpc.py; do
  grep -q "^class " "$module" || rm "$module"
done
