//! Ballast's task runner, `cargo xtask`: one module per command; parses the command line and calls the command.
//!
//! Of the other crates, the task runner depends only on `proxy-common`, which needs only the compiler: cargo must be able to
//! build it before the others. The tests of the task runner also use `proxy-user`.

mod apiserver;
mod apt;
mod bench;
mod build;
mod cargotools;
mod chart;
mod cluster;
mod cross;
mod demo;
mod docs;
mod e2e;
mod exec;
mod fuzz;
mod go;
mod gotools;
mod host;
mod image;
mod kernel;
mod linker;
mod lint;
mod log;
mod object;
mod package;
mod plugin;
mod release;
mod scale;
mod setup;
mod signal;
mod test;
mod toolchain;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

/// Build, test and release tasks of Ballast. Each command first installs the tools that it needs.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[command(disable_help_subcommand = true)]
enum Command {
    Setup(setup::Args),
    /// Build `ballast` with its BPF programs inside, or generate files of the repository
    Build(Either<build::Args, Generated>),
    /// Check format, clippy (host and BPF target, warnings denied), words, links between
    /// documents, commands in documents, generated documents, the chart with its manifests, workflows, shell scripts and systemd units
    Lint(Either<lint::Args, Dependencies>),
    /// Run the tests of all rungs, or of the given ones, or other tests and measurements
    ///
    /// A rung that this machine cannot run is skipped, with the reason; with CI=true the command fails instead. The commands
    /// below also work without `test`: `cargo xtask bench`.
    Test(Either<test::Args, Tests>),
    Demo(demo::Args),
    Image(image::Args),
    /// Check dependencies, and build all files of a release in target/release-files: programs and images for amd64 and arm64,
    /// packages, bills of materials, chart, units, SHA256SUMS (needs root and Go; takes minutes)
    Release(Either<release::Args, Packages>),
}

/// A command with sub-commands.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Either<A: clap::Args, C: Subcommand> {
    #[command(flatten)]
    args: A,
    #[command(subcommand)]
    command: Option<C>,
}

#[derive(Subcommand)]
enum Generated {
    Docs(docs::Args),
    /// Render deploy/manifests from the chart
    Chart,
}

#[derive(Subcommand)]
enum Dependencies {
    /// Check licences, sources and bans of all dependencies (cargo-deny; its first build takes minutes)
    Deny(release::Args),
}

#[derive(Subcommand)]
enum Tests {
    Fuzz(fuzz::Args),
    Bench(bench::Args),
    Scale(scale::Args),
    Cluster(cluster::Args),
    E2e(e2e::Args),
    Traffic(test::traffic::Args),
    Devices(kernel::devices::Args),
}

#[derive(Subcommand)]
enum Packages {
    Package(package::Args),
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Setup(args) => setup::run(&args),
        Command::Build(Either { args, command: None }) => build::run(&args),
        Command::Build(Either { command: Some(Generated::Docs(args)), .. }) => docs::run(&args),
        Command::Build(Either { command: Some(Generated::Chart), .. }) => chart::run(),
        Command::Lint(Either { args, command: None }) => lint::run(&args, Cli::command()),
        Command::Lint(Either { command: Some(Dependencies::Deny(args)), .. }) => release::deny(&args),
        Command::Test(Either { args, command: None }) => test::run(&args),
        Command::Test(Either { command: Some(Tests::Fuzz(args)), .. }) => fuzz::run(&args),
        Command::Test(Either { command: Some(Tests::Bench(args)), .. }) => bench::run(&args),
        Command::Test(Either { command: Some(Tests::Scale(args)), .. }) => scale::run(&args),
        Command::Test(Either { command: Some(Tests::Cluster(args)), .. }) => cluster::run(&args),
        Command::Test(Either { command: Some(Tests::E2e(args)), .. }) => e2e::run(&args),
        Command::Test(Either { command: Some(Tests::Traffic(args)), .. }) => test::traffic::run(&args),
        Command::Test(Either { command: Some(Tests::Devices(args)), .. }) => kernel::devices::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Release(Either { args, command: None }) => release::run(&args),
        Command::Release(Either { command: Some(Packages::Package(args)), .. }) => package::run(&args),
    }
}

/// Returns the arguments of this process. `cargo xtask bench` is short for `cargo xtask test bench`, like all of [`Tests`].
fn arguments() -> Vec<OsString> {
    let mut all: Vec<_> = std::env::args_os().collect();
    if all.get(1).is_some_and(|first| Tests::has_subcommand(&first.to_string_lossy())) {
        all.insert(1, "test".into());
    }
    all
}

fn main() -> ExitCode {
    match run(Cli::parse_from(arguments()).command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error(&error);
            ExitCode::FAILURE
        }
    }
}
