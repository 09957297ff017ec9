#!/usr/bin/env bash
# Format, lints and documentation; any warning fails.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/environment.sh

step "format"
cargo fmt --all -- --check
step "lints"
cargo clippy --workspace --all-targets -- -D warnings
step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
