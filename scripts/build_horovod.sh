#!/usr/bin/env bash
# Builds Horovod for the torch of an environment, keeps the wheel, and installs it there.
#
#   scripts/build_horovod.sh [PYTHON]        default: python
#
# There are no wheels of Horovod, and its last release does not build as it is with the C++ that torch needs. It takes
# 5 to 8 minutes on 2 cores, once: the wheel stays in the cache for the same Horovod, torch, Python and C library.
# The environment must have torch. A C++ compiler is needed; cmake is installed where there is none. If torch is a build
# for CUDA, as the wheels for Linux are by default, the CUDA toolkit of the same version is needed too, also for training
# on CPUs: nvcc and its headers, where CUDA_HOME says or nvcc on the PATH is. A CPU build of torch needs none.
#
#   DET_LIGHTNING_HOROVOD_CACHE      directory of the wheels; default: ~/.cache/det-lightning/horovod
#   DET_LIGHTNING_HOROVOD_TIMEOUT_S  the build is given up after so many seconds; default: 1800
#   DET_LIGHTNING_HOROVOD_OPTIONAL   if 1, say that it could not be built, and end with status 0 all the same
#   HOROVOD_...                      the settings of Horovod's own build, such as HOROVOD_GPU_OPERATIONS=NCCL for GPUs
set -euo pipefail

version=0.28.1
python=${1:-python}
timeout_s=${DET_LIGHTNING_HOROVOD_TIMEOUT_S:-1800}
cache=${DET_LIGHTNING_HOROVOD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/det-lightning/horovod}

say() { echo "build_horovod: $*" >&2; }

fail() {
    local optional=${DET_LIGHTNING_HOROVOD_OPTIONAL:-0}
    if [ "$optional" != 1 ]; then say "Set DET_LIGHTNING_HOROVOD_OPTIONAL=1 to go on without it."; fi
    say "################ Horovod is NOT installed: $*"
    exit $((optional != 1))
}

# Prints the CUDA version of torch and where its toolkit is; nothing for a build without CUDA.
cuda_of_torch() {
    "$python" -c '
import torch
if torch.version.cuda:
    from torch.utils.cpp_extension import CUDA_HOME
    print(torch.version.cuda, CUDA_HOME or "")
' 2>/dev/null
}

# Prints where a log first names an error, and what follows; pip only repeats at its end that there was one.
reason_in() {
    local generic='WARNING|subprocess-exited-with-error|Failed building wheel|Failed to build|did not run successfully'
    local line
    line=$(grep -nE '(^|[^[:alnum:]_-])(error|Error|ERROR): |CMake Error|[[:alnum:]]+(Error|Exception): |No space left' "$1" |
        grep -vE "$generic" | head -n 1 | cut -d: -f1) || true
    if [ -n "$line" ]; then sed -n "$line,$((line + 13))p" "$1"; else grep -v '^[[:space:]]*$' "$1" | tail -n 14; fi
}

# What a wheel depends on, and its file name does not tell. A local version such as +cu130 is part of torch's.
wheel_key() {
    "$python" - "$version" <<'PYTHON'
import os, platform, sys, sysconfig, torch
settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_") and "CACHE" not in k)
parts = [sys.argv[1], "torch" + torch.__version__, sysconfig.get_config_var("SOABI"), "-".join(platform.libc_ver())]
print("_".join([*parts, *settings]).replace("/", "-"))
PYTHON
}

installs() { "$python" -m pip install --quiet --no-deps --force-reinstall "$1" && (cd / && "$python" -c '
import horovod.torch as hvd
hvd.init()
assert hvd.size() == 1, hvd.size()
assert hvd.gloo_built() or hvd.nccl_built() or hvd.mpi_built(), "nothing to communicate with"
'); }

build() { # in a directory of its own, whose path is the first argument; the wheel is left in its folder wheel/
    cd "$1"
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation "horovod==$version"
    tar xzf "horovod-$version.tar.gz"
    cd "horovod-$version"
    # torch's headers need C++17, its own extensions use C++20; Horovod asks for C++14.
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt
    [ "$(grep -l 'set(CMAKE_CXX_STANDARD 20)' CMakeLists.txt horovod/torch/CMakeLists.txt | wc -l)" = 2 ]
    # The Gloo that it brings asks for a cmake older than cmake 4 supports.
    export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO="${HOROVOD_WITH_GLOO:-1}"
    export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    if [ "${HOROVOD_WITH_MPI:-0}" != 1 ]; then export HOROVOD_WITHOUT_MPI=1; fi
    "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$1/built" .
    # Without what is only there for a debugger it is a twentieth of the size.
    mkdir "$1/wheel" "$1/open"
    cd "$1/open"
    "$python" -m wheel unpack --dest . "$1"/built/horovod-*.whl
    find . -name '*.so' -exec strip -g {} +
    "$python" -m wheel pack --dest-dir "$1/wheel" horovod-*
}

"$python" -c 'import torch' || fail "$python has no torch."
folder=$cache/$(wheel_key)
if compgen -G "$folder/horovod-*.whl" >/dev/null && installs "$folder"/horovod-*.whl; then
    say "installed from $folder"
    exit 0
fi
read -r cuda toolkit <<<"$(cuda_of_torch)"
needs_toolkit=
if [ -n "$cuda" ] && [ -z "$toolkit" ]; then
    needs_toolkit=" torch is a build for CUDA $cuda, which needs the CUDA toolkit $cuda, and none was found:"
    needs_toolkit+=" install it and set CUDA_HOME, or use a CPU build of torch."
    say "${needs_toolkit# } Trying all the same."
fi
command -v "${CXX:-g++}" >/dev/null || fail "there is no C++ compiler (${CXX:-g++})."
needed=(setuptools wheel packaging cloudpickle psutil pyyaml cffi)
command -v cmake >/dev/null || needed+=(cmake)
"$python" -m pip install --quiet "${needed[@]}" || fail "what its build needs cannot be installed."
# Where cmake was installed just now, it lies beside python.
PATH=$PATH:$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PATH python version
export -f build

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "building horovod $version; this takes minutes"
started=$SECONDS
# A shell of its own: timeout ends the compilers with it.
status=0
timeout --kill-after=10 "$timeout_s" bash -euo pipefail -c 'build "$1" >"$1/log" 2>&1' build "$work" || status=$?
if [ "$status" != 0 ]; then
    tail -n 60 "$work/log" >&2
    if [ "$status" = 124 ] || [ "$status" = 137 ]; then
        fail "its build took longer than $timeout_s s. Set DET_LIGHTNING_HOROVOD_TIMEOUT_S to allow more."
    fi
    reason=$(reason_in "$work/log")
    fail "its build failed.$needs_toolkit The first error was:
$reason"
fi
say "built in $((SECONDS - started)) s: $(du -k "$work"/wheel/*.whl | cut -f1) KiB"
installs "$work"/wheel/horovod-*.whl || fail "what was built does not work."
# Whole or not at all, for others that look there at this moment.
mkdir -p "$cache"
staged=$(mktemp -d "$cache/new.XXXXXX")
cp "$work"/wheel/horovod-*.whl "$staged"
rm -rf "$folder"
mv -T "$staged" "$folder" 2>/dev/null || rm -rf "$staged"
say "kept in $folder"
