#!/usr/bin/env bash
# The same tests on CubeCL's CPU runtime with fusion, those of the device path without it too, and what
# can be checked of CUDA without a GPU: it builds, and every kernel lowers to PTX and to C++.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/environment.sh
# Features differ from those of the other scripts: a folder of its own keeps both warm.
export CARGO_TARGET_DIR=$CARGO_TARGET_DIR/cubecl

ci/llvm-from-debian.sh
if [ "$(uname -m)" = x86_64 ]; then
  # Code for CPUs without instructions for bfloat16 calls a function that Debian 12's runtime library lacks.
  mkdir -p "$CARGO_TARGET_DIR"
  gcc -O2 -shared -fPIC -o "$CARGO_TARGET_DIR/bf16-for-jit.so" ci/bf16-for-jit.c
  export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_PRELOAD=$CARGO_TARGET_DIR/bf16-for-jit.so"
fi
# One test at a time: the runtime's workers spin, and tests side by side starve each other.
one="--test-threads 1"
step "CPU runtime with fusion: lints"
cargo clippy -p burn-zero-offload --features cpu,fusion,train --all-targets -- -D warnings
step "CPU runtime with fusion: tests"
cargo test -p burn-zero-offload --features cpu,fusion,train --lib --tests -- $one
step "CPU runtime without fusion: device memory, faults, kernels, transfers"
cargo test -p burn-zero-offload --features cpu,train --test device_memory -- $one
cargo test -p burn-zero-offload --features cpu,train --lib -- $one fault_tests kernels download upload \
  --skip two_hundred --skip simulated
step "CUDA: build, and kernels lowered"
cargo build -p burn-zero-offload --features cuda
cargo test -p burn-zero-offload --features cuda --lib -- kernels
cargo clippy -p gpu-check --features cuda,fusion -- -D warnings
