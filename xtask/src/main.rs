//! `cargo xtask`: parses the command line and calls the command.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use xtask::{
    bench, build, chart, cluster, demo, deny, docs, e2e, fuzz, image, lint, log, package, release, scale,
    setup, test,
};

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
