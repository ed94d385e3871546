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
mod deny;
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
mod release;
mod scale;
mod setup;
mod signal;
mod test;
mod toolchain;
mod workspace;

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
enum Command {
    Setup(setup::Args),
    Build(build::Args),
    Lint(lint::Args),
    Test(test::Args),
    Demo(demo::Args),
    Bench(bench::Args),
    Scale(scale::Args),
    Fuzz(fuzz::Args),
    Docs(docs::Args),
    Cluster(cluster::Args),
    E2e(e2e::Args),
    Image(image::Args),
    Chart(chart::Args),
    Deny(deny::Args),
    Package(package::Args),
    Release(release::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args),
        Command::Build(args) => build::run(&args),
        Command::Lint(args) => lint::run(&args, Cli::command()),
        Command::Test(args) => test::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Docs(args) => docs::run(&args),
        Command::Cluster(args) => cluster::run(&args),
        Command::E2e(args) => e2e::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Chart(args) => chart::run(&args),
        Command::Deny(args) => deny::run(args),
        Command::Package(args) => package::run(&args),
        Command::Release(args) => release::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error(&error);
            ExitCode::FAILURE
        }
    }
}
