#!/usr/bin/env bash
# Builds the C++ core on GPU machines that do not have the dependencies of this package. It needs a python3 with torch, and
# no pip, no network and no pybind11 package, because torch contains the headers of pybind11. Replaces the built extension in this tree.
# usage: build_core.sh [PYTHON]
set -euo pipefail
python=${1:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
read -r suffix includes < <("$python" - <<'PY'
import os, sysconfig, torch
folders = [sysconfig.get_paths()["include"], os.path.join(os.path.dirname(torch.__file__), "include")]
print(sysconfig.get_config_var("EXT_SUFFIX"), *["-I" + folder for folder in folders])
PY
)
cd "$root/csrc"
# shellcheck disable=SC2086
compile() { g++ -O2 -ffp-contract=off -std=c++17 -fPIC -fvisibility=hidden $includes -c "$1" -o "$objects/${1//\//_}.o"; }
export -f compile
export includes objects
find . -name '*.cpp' -printf '%P\0' | xargs -0 -P "$(nproc)" -I{} bash -c 'compile {}'
g++ -shared -Wl,--exclude-libs,ALL "$objects"/*.o -o "$objects/core.so" -ldl -lpthread
mv "$objects/core.so" "$root/lightning_freescale/_C$suffix"
echo "built lightning_freescale/_C$suffix"
