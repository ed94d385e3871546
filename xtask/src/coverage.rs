//! `cargo xtask coverage`: reports which lines of all our crates the tests run (cargo-llvm-cov).
//!
//! The rungs run as usual, but with environment variables that make cargo build our crates with counters, into a separate
//! target folder. Programs in the kernel have no counters: for the data path, the same source built for the host counts.

pub mod lcov;
mod page;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::exec::Cmd;
use crate::explained::{self, Explained};
use crate::image::binary::rustc_says;
use crate::test::Rung;
use crate::workspace::Workspace;
use crate::{cargotools, log};
use lcov::Report;
use page::Uncovered;

/// Report which lines the tests run, and list the lines of the data path that no test runs (cargo-llvm-cov; its first build takes
/// minutes).
///
/// With the rung `unit`, the command fails if no test runs a line of the data path and xtask/explained.json does not explain
/// the line.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Rungs whose tests run [default: unit]
    #[arg(value_enum)]
    pub rungs: Vec<Rung>,
    /// Only the unit tests of these crates, which takes a minute: proxy-common, proxy-ebpf
    #[arg(long, value_name = "CRATE", value_delimiter = ',', conflicts_with = "rungs")]
    pub package: Vec<String>,
    /// Add to the counts of earlier runs, if the source has not changed
    #[arg(long)]
    pub add: bool,
    /// Run no tests; report the counts of earlier runs
    #[arg(long, conflicts_with = "package")]
    pub report: bool,
    /// Write docs/coverage.md: the table, and each line of the data path that no test runs, with the reason
    #[arg(long, conflicts_with = "package")]
    pub page: bool,
}

/// The crates whose uncovered lines are listed.
const DATA_PATH: [&str; 2] = ["proxy-common/", "proxy-ebpf/"];
/// Files of tests and benchmarks, and files whose code runs only in the kernel.
const NOT_COUNTED: &str = r"(/tests/|/flow/model/|/tests?\.rs$|_tests\.rs$|/benches/|/proxy-ebpf/src/(kernel|socket)/|/proxy-ebpf/src/main\.rs$)";

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let tools = llvm_tools()?;
    let target = workspace.target().join("coverage");
    let with_tools = |cmd: Cmd| {
        let cmd = cmd.env("CARGO_TARGET_DIR", &target).dir(workspace.root());
        tools.iter().fold(cmd, |cmd, (name, path)| cmd.env(name, path))
    };
    let shown = with_tools(cargotools::cargo(cargotools::LLVM_COV)?).arg("show-env").read()?;
    // Every command runs with the same environment variables, which say where the counts are.
    let counted = |cmd: Cmd| {
        variables(&shown).into_iter().fold(with_tools(cmd), |cmd, (name, value)| cmd.env(name, value))
    };
    let llvm_cov = || Ok::<_, anyhow::Error>(counted(cargotools::cargo(cargotools::LLVM_COV)?));
    if !args.add && !args.report {
        llvm_cov()?.args(["clean", "--workspace"]).run()?;
    }
    let rungs = if args.rungs.is_empty() { vec![Rung::Unit] } else { args.rungs.clone() };
    if args.report {
        log::step("report what earlier runs have counted");
    } else if args.package.is_empty() {
        let itself = std::env::current_exe().context("cannot find the running program")?;
        counted(Cmd::new(itself)).arg("test").args(rungs.iter().map(ToString::to_string)).run()?;
    } else {
        let packages = args.package.iter().flat_map(|name| ["--package", name]);
        // Without the feature `log`: log lines call the kernel's helpers.
        let features = ["--features", "proxy-ebpf/host"];
        counted(Cmd::cargo()).args(["test", "--lib"]).args(features).args(packages).run()?;
    }
    let lcov = llvm_cov()?.args(["report", "--lcov", "--ignore-filename-regex", NOT_COUNTED]).read()?;
    let report = Report::read(&lcov, workspace.root())?;
    ensure!(!report.files.is_empty(), "nothing was counted");
    log::line(report.table());
    let explained = Explained::read(&workspace)?;
    let mut uncovered = Uncovered::default();
    for file in report.files.iter().filter(|file| DATA_PATH.iter().any(|path| file.path.starts_with(path))) {
        if let Some(ranges) = file.uncovered() {
            log::line(format_args!("{}: {ranges}", file.path));
        }
        uncovered.add(file, workspace.root(), &explained)?;
    }
    if args.page {
        let names: Vec<_> = rungs.iter().map(ToString::to_string).collect();
        std::fs::write(workspace.root().join(page::PAGE), uncovered.page(&report, &names.join(" ")))
            .with_context(|| format!("cannot write {}", page::PAGE))?;
    }
    // The rung `unit` runs the data path on the host.
    if args.package.is_empty() && (args.add || rungs.contains(&Rung::Unit)) {
        for (file, line, text) in &uncovered.unexplained {
            log::line(format_args!("no test runs {file}:{line}: {text}"));
        }
        let number = uncovered.unexplained.len();
        ensure!(
            number == 0,
            "no test runs {number} lines of the data path: add tests, or explain in {} why none is needed",
            explained::FILE
        );
    }
    Ok(())
}

/// Returns llvm-cov and llvm-profdata of the compiler's LLVM: other versions cannot read the files of its counters.
fn llvm_tools() -> Result<[(&'static str, PathBuf); 2]> {
    let version = rustc_says("LLVM version")?;
    let major = version.split('.').next().unwrap_or_default().to_owned();
    let folder = PathBuf::from(format!("/usr/lib/llvm-{major}/bin"));
    let tool = |name: &str| folder.join(name);
    ensure!(
        tool("llvm-cov").exists() && tool("llvm-profdata").exists(),
        "no llvm-cov and llvm-profdata of LLVM {version} in {}: apt-get install llvm-{major}",
        folder.display()
    );
    Ok([("LLVM_COV", tool("llvm-cov")), ("LLVM_PROFDATA", tool("llvm-profdata"))])
}

/// Parses the output of `cargo llvm-cov show-env`: `NAME=value` or `NAME='value'`, one per line.
fn variables(shown: &str) -> Vec<(String, String)> {
    let variable = |line: &str| {
        let (name, value) = line.trim().trim_start_matches("export ").split_once('=')?;
        let quoted = ['\'', '"'].into_iter().find_map(|q| value.strip_prefix(q)?.strip_suffix(q));
        Some((name.to_owned(), quoted.unwrap_or(value).to_owned()))
    };
    shown.lines().filter_map(variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_with_and_without_quotes() {
        let shown =
            "RUSTFLAGS='-C instrument-coverage'\nexport A=\"b c\"\nLLVM_PROFILE_FILE=/x/%p.profraw\n\n";
        let expected =
            [("RUSTFLAGS", "-C instrument-coverage"), ("A", "b c"), ("LLVM_PROFILE_FILE", "/x/%p.profraw")];
        assert_eq!(variables(shown), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
