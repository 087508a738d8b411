#!/usr/bin/env bash
# All checks and figures of a GPU, in less than nine minutes: scripts/check_gpu.sh [--smoke] [DIRECTORY OF WHEELS]
#
# Prints one line for each part, with its seconds; the outputs are in $OUT, by default ./gpu-check. A part that is
# interrupted at its limit shows what it has found so far. Wheels that are missing (det_lightning itself, for pytest to
# find its plugin; its dependencies; determined==0.38.1) are installed from the directory, without a network. --smoke
# runs everything on a CPU, with tiny models, to test this script.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$PWD/gpu-check}
mkdir -p "$out"
smoke=
if [ "${1:-}" = --smoke ]; then
    smoke=--smoke
    export CUDA_VISIBLE_DEVICES=
    shift
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "${1:-}" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$1"/*.whl || exit
fi
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTEST_ADDOPTS="-q -p no:cacheprovider"
failed=0

part() { # NAME SECONDS COMMAND...: runs the command, for so many seconds at most
    local name=$1 limit=$2 begun=$SECONDS status
    shift 2
    timeout --foreground -s INT -k 20 "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    [ $status = 0 ] || failed=1
    printf '%-12s status %-3s %4d s  %s\n' "$name" $status $((SECONDS - begun)) "$(tail -n 1 "$out/$name.txt")"
}

python3 - <<'PYTHON'
import platform, torch, pytorch_lightning
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{device}, torch {torch.__version__}, Lightning {pytorch_lightning.__version__}, Python {platform.python_version()}")
PYTHON
megabytes=1000
[ -z "$smoke" ] || megabytes=50
tests="python3 -m pytest -rs -n ${WORKERS:-8}"
part gpu 150 $tests tests/gpu --ignore tests/gpu/test_same_as_determined.py
part conformance 90 $tests tests/gpu/test_same_as_determined.py
part speed 130 python3 benchmarks/gpu.py $smoke
part checkpoint 70 python3 benchmarks/checkpoint.py --megabytes $megabytes --checkpoints 3
part quick 90 $tests tests/engine tests/adapters tests/pytorch tests/precision tests/checkpoint -m "not slow"
cat "$out/speed.txt" "$out/checkpoint.txt"
exit $failed
