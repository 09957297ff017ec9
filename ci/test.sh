#!/usr/bin/env bash
# The tests of the README, on the default backend.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/environment.sh

step "README: tests"
cargo test --workspace
