#!/usr/bin/env bash
# Our CPU step, the memory of this machine and the peers, in one run: benches/peers/run.sh [PARAMETERS] [THREADS]
# The table goes to standard output, everything else to standard error.
set -euo pipefail

parameters=${1:-200000000}
threads=${2:-2}
if (($# > 2)) || ! [[ $parameters =~ ^[1-9][0-9]*$ && $threads =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 [PARAMETERS] [THREADS]" >&2
  exit 2
fi
# Our state asks for huge pages where it is large. The others have what malloc gives them, as everybody who
# uses them has; with PEERS_HUGE_PAGES=1 malloc asks as well.
[ "${PEERS_HUGE_PAGES:-0}" = 1 ] && export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
from=$PWD
venv=${PEERS_VENV:+$(realpath -m -- "$PEERS_VENV")}
cd "$(dirname "$0")/../.."
venv=${venv:-$PWD/benches/peers/venv}
. ci/environment.sh
# Before the builds, so that it tells of others.
load=$(cut -d' ' -f1-3 /proc/loadavg)
date=$(date -u '+%Y-%m-%d %H:%M UTC')

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
lines=$temporary/lines
note() { printf 'note\t%s\t%s\n' "$1" "$2" >> "$lines"; }
# Runs a command; what it prints is kept and shown.
measure() { "$@" | tee -a "$lines" >&2; }
# What DeepSpeed compiles stays in the environment, ninja is found in it, scratch files go when we do.
peers() {
  env PATH="$venv/bin:$PATH" TMPDIR="$temporary" DS_ACCELERATOR=cpu \
    TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}" \
    STREAM_LIBRARY="$temporary/libstream.so" "$venv/bin/python" benches/peers/peers.py "$parameters" "$threads" "$1"
}

# Everything is built before anything is measured.
step "build" >&2
gcc -O3 -march=native -fopenmp benches/peers/stream.c -o "$temporary/stream"
gcc -O3 -march=native -fopenmp -shared -fPIC benches/peers/stream.c -o "$temporary/libstream.so"
cargo bench -p burn-zero-offload --bench cpu_step --no-run >&2
with=()
if versions=$("$venv/bin/python" -c 'from importlib.metadata import version as v
print("torch", v("torch") + ", deepspeed", v("deepspeed") + ", numpy", v("numpy") + ", ninja", v("ninja"))' 2>/dev/null); then
  with=(torch)
  if peers build >&2; then
    with=(deepspeed torch)
  else
    echo "DeepSpeed's kernel did not build: going on without it" >&2
    note "failed" "build of DeepSpeed's kernel"
  fi
else
  versions="not installed"
  install=$(printf %q "$(realpath -m --relative-to="$from" -- "$venv")")
  echo "No torch and deepspeed there: going on without the peers. These install them (4 GB, once):" >&2
  echo "  python3 -m venv $install" >&2
  echo "  $install/bin/pip install torch deepspeed numpy ninja setuptools" >&2
fi

# nproc would answer with OMP_NUM_THREADS.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
note "CPU" "$(LC_ALL=C lscpu | sed -n 's/^Model name: *//p' | paste -sd ,)"
note "cores, threads" "$cores, $threads"
note "huge pages" "$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null || echo unknown)"
note "load average before" "$load"
note "date" "$date"
note "commit" "$(git describe --always --dirty 2>/dev/null || echo unknown)"
note "compilers" "$(gcc --version | head -n 1), $(rustc --version)"
note "peers" "$versions"

step "stream" >&2
measure "$temporary/stream" "$parameters" "$threads"
step "ours" >&2
measure cargo bench -p burn-zero-offload --bench cpu_step -- --tsv "$parameters" "$threads"
for peer in ${with[@]+"${with[@]}"}; do
  step "$peer" >&2
  if ! measure peers "$peer"; then
    note "failed" "$peer"
  fi
done
step "stream again" >&2
measure "$temporary/stream" "$parameters" "$threads"

step "table" >&2
python3 benches/peers/ratios.py "$parameters" < "$lines"
