//! `cargo xtask fuzz`: more random cases than the tests have time for.

use std::fmt;

use anyhow::{Context as _, Result};

use crate::test::cargo::cargo_test;
use crate::workspace::Workspace;
use crate::{build, log};

/// Compare the packet programs with their model on random cases (needs root).
///
/// The tests do the same on a million packets. A case that differs is made small and printed, with the line that runs it
/// again.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Packets, in all
    #[arg(long, value_name = "NUMBER", default_value_t = 100_000_000)]
    pub cases: u64,
    /// Which cases: the same number gives the same ones
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Cases at once; one for each core when nothing is said
    #[arg(long, value_name = "NUMBER")]
    pub threads: Option<usize>,
    /// Cases that may differ before it ends
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub differences: u64,
    /// Write cases that differ, and those that come through a branch of the model first, to the corpus
    #[arg(long)]
    pub keep: bool,
    /// Run the stages that are built for the host, instead of the programs in the kernel (needs no root)
    #[arg(long)]
    pub host: bool,
    /// Run this case only: the line that was printed, `replay(&[...]);`
    #[arg(long, value_name = "CASE")]
    pub replay: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    if args.host {
        build::bpf(&workspace, &build::Args::default())?;
    } else {
        build::to_load(&workspace, "fuzz").context("--host needs neither root nor tools")?;
    }
    log::step("fuzz");
    let which: &[&str] = if args.host { &["on the host"] } else { &["--include-ignored", "the programs"] };
    let mut cargo = cargo_test(&workspace).args(["--test", "fuzz", "--", "--nocapture"]).args(which);
    for (name, value) in environment(args) {
        cargo = cargo.env(name, value);
    }
    cargo.run()
}

/// What `proxy-user/tests/fuzz` is told.
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
