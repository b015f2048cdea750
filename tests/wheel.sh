#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment away from the tree, and tries it there.
# usage: tests/wheel.sh PYTHON   (a Python with `build` installed)
set -euo pipefail
python=$1
tree=$(cd "$(dirname "$0")/.." && pwd)
case $python in /*) ;; *) python=$PWD/$python ;; esac
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
"$python" -m build --quiet --wheel --outdir "$away/dist" "$tree"
wheel=$(echo "$away"/dist/*.whl)
size=$(stat -c %s "$wheel")
test "$size" -lt 10000000 || { echo "the wheel has $size bytes, more than 10 MB"; exit 1; }
# The new environment borrows the installed dependencies, so that only the wheel is new in it.
"$python" -m venv "$away/venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
own=$("$away/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$away/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
echo "$site" > "$own/borrowed.pth"
cd "$away"
cat > check.py <<'PY'
import pathlib
import sys

import tokencredit
from tokencredit import lab

home = pathlib.Path(tokencredit.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
assert (home.parent / "py.typed").is_file()
model, tokenizer = lab.load_policy("chain-qwen3")
assert sum(p.numel() for p in model.parameters()) > 500_000
PY
venv/bin/python check.py
venv/bin/tokencredit --version
venv/bin/tokencredit methods
venv/bin/tokencredit train --lab --max_steps 2 --eval_prompts 64 --output_dir run
test -s run/model.safetensors
test -s run/rollouts.jsonl
venv/bin/tokencredit assign run/rollouts.jsonl --credit grpo_s -o out.jsonl.gz
venv/bin/tokencredit view run
test -s run/view.html
echo "wheel: $size bytes, works outside the tree"
