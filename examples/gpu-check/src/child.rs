//! This program, started once more for a part of a check.

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::args::{Args, Setting};
use crate::{largest, streams};

const STREAMS: &str = "streams";

/// Plays the part `role`.
pub fn play(role: &str, args: &Args) -> ExitCode {
    let done = match role {
        STREAMS => streams::reference(args),
        largest::PLAIN => largest::try_one(args, false),
        largest::OFFLOADED => largest::try_one(args, true),
        other => Err(anyhow::anyhow!("there is no part called `{other}` to play")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The hashes of the models of the stream check, computed on a single stream.
pub fn single_stream(setting: &Setting) -> Result<Vec<String>, String> {
    let limit = setting.left().max(Duration::from_secs(30));
    let output = run(setting, STREAMS, 0, limit).map_err(|error| format!("{error:#}"))?;
    Ok(output.lines().map(str::to_string).collect())
}

/// Starts this program in the part `role` and returns what it printed.
///
/// # Errors
///
/// Fails if it did not end well within `limit`; it is ended then.
pub fn run(setting: &Setting, role: &str, layers: usize, limit: Duration) -> Result<String> {
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut command = Command::new(program);
    command.args(["--child", role, "--device", setting.backend.name()]);
    command.args(["--layers", &layers.to_string()]);
    command.args(["--card-gib", &setting.card_gib.to_string()]);
    if setting.small {
        command.arg("--small");
    }
    if role != STREAMS {
        // Those only ask whether a model fits: every one of them would tune its kernels anew.
        command.env("CUBECL_AUTOTUNE_LEVEL", "minimal");
    }
    // What goes wrong in there is this process' to report, in one line.
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .context("a child process could not be started")?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    // Pipes fill up: both have to be read while the child runs.
    let out = std::thread::spawn(move || read(out));
    let err = std::thread::spawn(move || read(err));
    let started = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if started.elapsed() > limit => {
                child.kill()?;
                child.wait()?;
                bail!(
                    "the child process took more than {:.0} s",
                    limit.as_secs_f64()
                );
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let (out, err) = (
        out.join().unwrap_or_default(),
        err.join().unwrap_or_default(),
    );
    if !status.success() {
        // A panic says where in one line and what in the next.
        let lines: Vec<&str> = err.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines.iter().rev().find(|line| !line.starts_with("note:"));
        bail!(
            "the child process ended with {status}: {}",
            last.unwrap_or(&"no word")
        );
    }
    Ok(out)
}

fn read(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        // A pipe that breaks has said what it had to say.
        let _ = pipe.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
