//! `cargo xtask test`: runs the rungs of the tests, the cheapest first.

mod rung;
pub mod traffic;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::cross::Arch;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{apiserver, build, exec, kernel, log};
pub use rung::Rung;

/// Which tests.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The rungs to run [default: all]
    #[arg(value_enum)]
    pub rungs: Vec<Rung>,
    /// Boot the newest kernel of this series in qemu, and check that every program loads and works: 5.10, 5.13, 5.15, 5.19, 6.1,
    /// 6.12, sid (the newest of Debian unstable), and 6.1-rt, 6.12-rt, sid-rt with `PREEMPT_RT`; or `running`: the kernel of this
    /// machine, without qemu
    #[arg(long, value_name = "LINE", conflicts_with = "rungs")]
    pub kernel: Option<String>,
    /// The architecture of that kernel
    #[arg(long, value_enum, default_value_t, requires = "kernel")]
    pub arch: Arch,
    /// Root folder of a machine whose apt sources have that kernel's distribution
    #[arg(long, value_name = "DIR", default_value = "/", requires = "kernel")]
    pub apt_root: PathBuf,
    /// Write the verifier's figures for that kernel to docs/verifier.md, instead of comparing them
    #[arg(long, requires = "kernel")]
    pub record: bool,
    /// Passed to the tests: a filter and flags of the test runner
    #[arg(last = true, value_name = "FILTER")]
    pub filter: Vec<String>,
}

/// Result of a rung.
#[derive(Debug)]
enum Outcome {
    Passed(Duration),
    Failed(Duration, anyhow::Error),
    /// Why the rung did not run, and what the user can do about it.
    Skipped(String),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    if let Some(version) = &args.kernel {
        return kernel::run(&workspace, version, args.arch, &args.apt_root, args.record);
    }
    let mut rungs = if args.rungs.is_empty() { Rung::ALL.to_vec() } else { args.rungs.clone() };
    rungs.sort_unstable();
    rungs.dedup();

    // This build starts first: it takes minutes on a new machine, and everything else can run at the same time.
    let wants_api_server = rungs.contains(&Rung::Apiserver) && exec::is_root();
    let mut api_server = wants_api_server.then(|| apiserver::start(&workspace));
    if exec::is_root() && rungs.iter().any(|rung| *rung > Rung::Unit) {
        setup::tools(Need::Netns)?;
    }
    build::bpf(&workspace, &build::Args::default())?;
    log::timed("build the agent and the tests", || {
        let only = if rungs == [Rung::Unit] { &["--lib", "--bins", "--test", "fuzz"][..] } else { &[] };
        workspace.cargo_test().arg("--no-run").args(only).run()
    })?;

    let mut outcomes = Vec::new();
    for rung in rungs {
        log::step(format_args!("test {rung}: {}", rung.what()));
        let start = Instant::now();
        let outcome = match rung.environment(&workspace, api_server.take_if(|_| rung == Rung::Apiserver)) {
            Err(skip) => Outcome::Skipped(skip),
            Ok(environment) => match rung.run(&workspace, &environment, &args.filter) {
                Ok(()) => Outcome::Passed(start.elapsed()),
                Err(error) => Outcome::Failed(start.elapsed(), error),
            },
        };
        outcomes.push((rung, outcome));
    }
    log::line("");
    for (rung, outcome) in &outcomes {
        log::line(format_args!("{:<10} {}", rung.to_string(), outcome.line()));
    }
    verdict(&outcomes, exec::in_ci())
}

/// Returns an error if a rung failed or, in CI, was skipped.
fn verdict(outcomes: &[(Rung, Outcome)], in_ci: bool) -> Result<()> {
    let bad = |outcome: &Outcome| match outcome {
        Outcome::Passed(_) => false,
        Outcome::Failed(..) => true,
        Outcome::Skipped(_) => in_ci,
    };
    let bad: Vec<_> =
        outcomes.iter().filter(|(_, outcome)| bad(outcome)).map(|(rung, _)| rung.to_string()).collect();
    if !bad.is_empty() {
        bail!("not passed: {}", bad.join(", "));
    }
    Ok(())
}

impl Outcome {
    fn line(&self) -> String {
        match self {
            Self::Passed(time) => format!("ok ({})", log::seconds(*time)),
            Self::Failed(time, error) => format!("FAILED ({}): {error:#}", log::seconds(*time)),
            Self::Skipped(why) => format!("skipped: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_fails_only_in_ci() {
        let outcomes = [
            (Rung::Unit, Outcome::Passed(Duration::ZERO)),
            (Rung::Netns, Outcome::Skipped("no root".into())),
        ];
        verdict(&outcomes, false).unwrap();
        let error = verdict(&outcomes, true).unwrap_err().to_string();
        assert!(error.contains("netns") && !error.contains("unit"), "{error}");
    }
}
