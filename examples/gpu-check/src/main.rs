//! Checks the offload on the device at hand and measures it: one table, in Markdown.
//!
//! ```sh
//! cargo run --release -p gpu-check --features cuda,fusion              # with an NVIDIA GPU
//! cargo run --release -p gpu-check -- --device flex --small            # anywhere, in seconds
//! cargo build --profile dist -p gpu-check --features cuda,fusion       # one file to copy to a GPU
//! ```
//!
//! The file is target/dist/gpu-check. It holds LLVM, which makes it large (compress it for the way), and
//! needs libstdc++, libz, libzstd and a C library no older than the one it was built with.
//!
//! Without `--device` it wants a CUDA device and exits with 2 where there is none. Otherwise it exits
//! with 1 if a check failed and with 0 if all passed. Progress goes to stderr, the table to stdout.
//!
//! Rows marked `info` are measurements without a bound; `skip` rows say what was not run and why.

mod args;
mod child;
#[path = "../../train-gpt/src/device.rs"]
mod device;
mod gpt;
mod header;
mod largest;
mod memory;
// The model of the training example, so that the numbers are about a program one can read.
#[path = "../../train-gpt/src/model.rs"]
mod model;
mod numbers;
mod overlap;
mod parity;
#[path = "../../../benches/common/parts.rs"]
mod parts;
mod present;
#[path = "../../../benches/common/rates.rs"]
mod rates;
mod stack;
mod streams;
mod table;
mod tokens;
mod transfers;
#[cfg(test)]
#[path = "../../train-gpt/src/turns.rs"]
mod turns;
mod watch;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use crate::args::{Args, Setting};
use crate::device::Backend;
use crate::table::Table;
use crate::transfers::Link;
use crate::watch::Watch;

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(role) = &args.child {
        return child::play(role, &args);
    }
    let backend = match args.device {
        Some(backend) => backend,
        None => match present::cuda() {
            Ok(()) => Backend::Cuda,
            Err(reason) => {
                eprintln!("gpu-check: {reason}");
                return ExitCode::from(2);
            }
        },
    };
    if args.device == Some(Backend::Cuda)
        && let Err(reason) = present::cuda()
    {
        eprintln!("gpu-check: {reason}");
        return ExitCode::from(2);
    }
    let setting = match Setting::new(backend, &args) {
        Ok(setting) => setting,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            return ExitCode::from(2);
        }
    };

    let table = Arc::new(Table::new(header::describe(&setting), args.out.clone()));
    let watch = Watch::start(&setting, table.clone(), args.only);
    let mut link = Link::default();
    watch.section("parity", || parity::check(&setting));
    watch.section("streams", || streams::check(&setting));
    watch.section("memory", || memory::check(&setting));
    watch.section("transfers", || transfers::measure(&setting, &mut link));
    watch.section("overlap", || overlap::measure(&setting, &link));
    watch.section("tokens", || tokens::measure(&setting));
    watch.section("largest", || largest::measure(&setting));
    println!("{}", table.print());
    if table.failed() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
