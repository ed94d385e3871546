//! `cargo xtask test fuzz`: runs more random cases than the tests have time for.

use std::fmt;

use anyhow::{Context as _, Result};

use crate::workspace::Workspace;
use crate::{build, log};

/// Compare the packet programs with their model on random cases (needs root).
///
/// The tests do the same with a million packets. A case that differs is minimized and printed, with the command that repeats
/// it.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Total number of packets
    #[arg(long, value_name = "NUMBER", default_value_t = 100_000_000)]
    pub cases: u64,
    /// Seed of the random cases
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Number of threads [default: one for each core]
    #[arg(long, value_name = "NUMBER")]
    pub threads: Option<usize>,
    /// Stop after this many cases that differ
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub differences: u64,
    /// Write cases that differ, and cases that reach a new branch of the model, to the corpus
    #[arg(long)]
    pub keep: bool,
    /// Test the stages built for the host instead of the programs in the kernel (needs no root)
    #[arg(long)]
    pub host: bool,
    /// Run only this case: the printed line, `replay(&[...]);`
    #[arg(long, value_name = "CASE")]
    pub replay: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    if args.host {
        build::bpf(&workspace, &build::Args::default())?;
    } else {
        build::prepare_to_load(&workspace, "fuzz").context("--host needs neither root nor tools")?;
    }
    log::step("fuzz");
    let which: &[&str] = if args.host { &["on the host"] } else { &["--include-ignored", "the programs"] };
    let mut cargo = workspace.cargo_test().args(["--test", "fuzz", "--", "--nocapture"]).args(which);
    for (name, value) in environment(args) {
        cargo = cargo.env(name, value);
    }
    cargo.run()
}

/// Returns the environment variables for `proxy-user/tests/fuzz`.
fn environment(args: &Args) -> Vec<(&'static str, String)> {
    let number = |number: &dyn fmt::Display| number.to_string();
    let mut environment = vec![
        ("BALLAST_FUZZ_CASES", number(&args.cases)),
        ("BALLAST_FUZZ_HOST_CASES", number(&args.cases)),
        ("BALLAST_FUZZ_SEED", number(&args.seed)),
        ("BALLAST_FUZZ_DIFFERENCES", number(&args.differences)),
        ("BALLAST_FUZZ_KEEP", number(&u8::from(args.keep))),
    ];
    environment.extend(args.threads.map(|threads| ("BALLAST_FUZZ_THREADS", number(&threads))));
    environment.extend(args.replay.clone().map(|case| ("BALLAST_FUZZ_REPLAY", case)));
    environment
}
