//! What a user of burn-zero-offload can rely on, one module per guarantee.
//!
//! Every test runs on each backend compiled in: Flex always, the CubeCL CPU runtime with
//! `--features cpu`, with fusion where `fusion` is on.

#![allow(missing_docs)]

mod common;

mod accumulation;
mod bitwise;
mod clipping;
mod clones;
mod delayed;
mod element_types;
mod forward_overlapped;
mod frozen_parameters;
mod learner;
mod lora;
mod loss_scaling;
mod memory;
mod odd_uses;
mod parameters;
mod parity_with_burn;
mod random_models;
mod recipes;
mod records;
mod refusals;
mod rules;
mod state_precision;
mod threads;
mod transfers;
mod verdict;
