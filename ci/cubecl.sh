#!/usr/bin/env bash
# The same tests on CubeCL's CPU runtime with fusion, and a build for CUDA (no GPU needed).
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/environment.sh
# Features differ from those of the other scripts: a folder of its own keeps both warm.
export CARGO_TARGET_DIR=$CARGO_TARGET_DIR/cubecl

ci/llvm-from-debian.sh
step "CPU runtime with fusion: lints"
cargo clippy -p burn-zero-offload --features cpu,fusion --all-targets -- -D warnings
step "CPU runtime with fusion: tests"
# One test at a time: the runtime's workers spin, and tests side by side starve each other.
cargo test -p burn-zero-offload --features cpu,fusion --lib --tests -- --test-threads 1
step "CUDA: build"
cargo build -p burn-zero-offload --features cuda
