//! What a user of burn-zero-offload can rely on, one module per guarantee.
//!
//! Every test runs on each backend compiled in: Flex always, the CubeCL CPU runtime with
//! `--features cpu`, with fusion where `fusion` is on.

#![allow(missing_docs)]

mod common;

mod parity_with_burn;
