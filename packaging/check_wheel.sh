#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel; looks at what is in them; installs the wheel into a fresh
# environment and uses it there: help, the tiny reasoner from the wheel, the embedded chat model, and
# a server that answers and drains. Leaves both archives in FOLDER.
#
#   bash packaging/check_wheel.sh [FOLDER]      (default build/dist)
#
# The tree is copied first, so nothing here sees or leaves anything in build/ or *.egg-info.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
dist=$(mkdir -p "${1:-$root/build/dist}" && cd "${1:-$root/build/dist}" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -9 "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

say() { echo "check_wheel: $*" >&2; }
fail() { say "$*"; exit 1; }

say "building in a copy of the tree"
mkdir "$work/tree"
(cd "$root" && git ls-files -z --cached --others --exclude-standard) \
    | (cd "$root" && xargs -0 -I{} sh -c 'test ! -f "{}" || cp --parents "{}" "$1"' sh "$work/tree")
"$python" -m venv "$work/builder"
"$work/builder/bin/pip" install -q -c "$root/constraints.txt" build
"$work/builder/bin/python" -m build --outdir "$work/dist" "$work/tree" >"$work/build.log" 2>&1 \
    || { tail -30 "$work/build.log" >&2; fail "the build failed"; }
"$python" "$root/packaging/check_contents.py" "$work/tree" "$work/dist"

say "installing the wheel into a fresh environment"
cd "$work"
unset PYTHONPATH
"$python" -m venv env
wheel=$(echo dist/*.whl)
env/bin/pip install -q -c "$root/constraints.txt" "torch==2.13.0"
env/bin/pip install -q -c "$root/constraints.txt" "$wheel"
env/bin/pip check
env/bin/zipage --help >help.txt
grep -q generate help.txt || fail "zipage --help does not name generate"
env/bin/zipage version

say "the tiny reasoner, whose weights are in the wheel"
env/bin/zipage generate "multiply 4719*386" \
    --model zipage-tiny-reasoner --temperature 0 --max-tokens 1500 >reasoned.txt
grep -qF "answer: $((4719 * 386))" reasoned.txt || fail "4719*386: $(tail -1 reasoned.txt)"
tail -1 reasoned.txt

say "the embedded chat model"
env/bin/zipage models pull smollm2-135m
env/bin/zipage generate "What is the capital of France?" --temperature 0 --max-tokens 16 >said.txt
grep -q Paris said.txt || fail "the embedded model said: $(cat said.txt)"
cat said.txt

say "the server, with the extra serve"
env/bin/pip install -q -c "$root/constraints.txt" "$wheel[serve]"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
env/bin/zipage serve zipage-tiny-reasoner --port "$port" >serve.log 2>&1 &
server=$!
for _ in $(seq 300); do
    curl -sf "http://127.0.0.1:$port/ready" >/dev/null && break
    kill -0 "$server" 2>/dev/null || { cat serve.log >&2; fail "the server ended while starting"; }
    sleep 0.2
done
curl -sf "http://127.0.0.1:$port/v1/models" | grep -q zipage-tiny-reasoner \
    || { cat serve.log >&2; fail "the server does not name its model"; }
kill -TERM "$server"
wait "$server" || { cat serve.log >&2; fail "the server did not end well after SIGTERM"; }
server=

mkdir -p "$dist" && rm -f "$dist"/*.whl "$dist"/*.tar.gz && cp dist/*.whl dist/*.tar.gz "$dist"
say "all well; archives in $dist"
