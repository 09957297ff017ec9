#!/usr/bin/env bash
# Every example and benchmark runs to its end, small.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/environment.sh

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
step "example quickstart"
cargo run --release -p quickstart
step "example train-gpt: three element types, small"
cargo run --release -p train-gpt -- --compare --steps 12 --layers 2 --width 32 --heads 2 --context 32 \
  --out "$out/gpt"
step "example train-gpt: every way to keep the state, small"
cargo run --release -p train-gpt -- --compare-states --steps 6 --layers 1 --width 32 --heads 2 --context 32 \
  --out "$out/states"
step "example train-gpt: schedules, small, and a timeline"
cargo run --release -p train-gpt -- --compare-schedules --steps 45 --layers 1 --width 32 --heads 2 --context 32 \
  --out "$out/schedules"
cargo run --release -p train-gpt -- --schedule overlapped --timeline "$out/timeline" --steps 6 --layers 1 \
  --width 32 --heads 2 --context 32 --out "$out/timeline"
test -s "$out/timeline.json" && test -s "$out/timeline.svg"
step "example train-gpt: stop and resume"
cargo run --release -p train-gpt -- --steps 6 --layers 2 --width 32 --heads 2 --context 32 \
  --accumulation 2 --out "$out/resume"
cargo run --release -p train-gpt -- --resume --out "$out/resume"
step "example learner"
root=$PWD
(cd "$out" && cargo run --release --manifest-path "$root/Cargo.toml" -p learner --no-default-features \
  --features flex)
step "benchmark cpu_step"
cargo bench -p burn-zero-offload --bench cpu_step -- --all --sizes 1000000
cargo bench -p burn-zero-offload --bench cpu_step -- --memory 1000000
step "peers: the script runs to its end without them"
PEERS_VENV="$out/none" benches/peers/run.sh 1000000 1 > "$out/peers.md"
grep -q "| SplitMaster bf16 |" "$out/peers.md"
step "benchmark transfer, small"
cargo bench -p burn-zero-offload --bench transfer -- 1 3
step "benchmark tensors, small"
cargo bench -p burn-zero-offload --bench tensors -- 100 64
step "benchmark schedules, small"
cargo bench -p burn-zero-offload --bench schedules -- 5 64 2 50
step "benchmark step, small"
cargo bench -p burn-zero-offload --bench step -- 20 64 2
step "example gpu-check on Flex, small"
cargo run --release -p gpu-check -- --device flex --small --out "$out/gpu-check.md"
grep -q '| parity |' "$out/gpu-check.md"
step "example gpu-check says that a build without CUDA has none, and exits with 2"
code=0
cargo run --release -p gpu-check || code=$?
[ "$code" = 2 ]
