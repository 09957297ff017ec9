# Sourced by the other scripts: where builds go, so that a second run is quick.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/burn-zero-offload/target}
export CARGO_TERM_COLOR=never
export RUST_BACKTRACE=0
step() { printf '\n== %s (%(%H:%M:%S)T)\n' "$*" -1; }
