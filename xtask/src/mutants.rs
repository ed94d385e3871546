//! `cargo xtask mutants`: changes the source, one place at a time, and tells which changes no test notices (cargo-mutants).

use anyhow::{Result, bail};

use crate::cargotools;
use crate::workspace::Workspace;

/// Change pure rules and packet stages, one place at a time, and tell which changes no test notices (cargo-mutants; built once,
/// in minutes; one change takes seconds to a minute).
///
/// Changes that need not be noticed are excluded in .cargo/mutants.toml, each with the reason.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// What is changed
    #[arg(value_enum, default_values_t = Part::ALL)]
    pub parts: Vec<Part>,
    /// Only changes whose description matches this regular expression (`cargo mutants --list` tells them)
    #[arg(long, value_name = "REGEX")]
    pub re: Option<String>,
    /// Do only a share: the K-th of N parts, as K/N, from 0/N on
    #[arg(long, value_name = "K/N")]
    pub shard: Option<String>,
}

/// A part of the source, whose tests are run for each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The rules that programs and agent share: decide, select, conntrack (fast)
    Rules,
    /// The packet stages, built for the host
    Stages,
    /// The plan of a Service (slow: the agent's crate is built for each change)
    Plan,
}

impl Part {
    const ALL: [Self; 3] = [Self::Rules, Self::Stages, Self::Plan];

    const fn package(self) -> &'static str {
        match self {
            Self::Rules => "proxy-common",
            Self::Stages => "proxy-ebpf",
            Self::Plan => "proxy-user",
        }
    }

    /// The features that its unit tests need. The programs' `log` is for the kernel alone.
    const fn features(self) -> &'static str {
        match self {
            Self::Rules => "user",
            Self::Stages => "host",
            Self::Plan => "",
        }
    }

    const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Rules => {
                &["proxy-common/src/decide.rs", "proxy-common/src/select.rs", "proxy-common/src/conntrack.rs"]
            }
            Self::Stages => &["proxy-ebpf/src/stage/*.rs"],
            Self::Plan => &["proxy-user/src/plan/**/*.rs"],
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let mut survived = Vec::new();
    for part in &args.parts {
        let output = workspace.target().join("mutants").join(part.package());
        std::fs::create_dir_all(&output)?;
        let mut cmd = cargotools::cargo(cargotools::MUTANTS)?
            .args([
                "--package",
                part.package(),
                "--features",
                part.features(),
                "--no-shuffle",
                "--colors",
                "never",
                "--output",
            ])
            .arg(&output);
        for file in part.files() {
            cmd = cmd.args(["--file", file]);
        }
        for (flag, value) in [("--re", &args.re), ("--shard", &args.shard)] {
            if let Some(value) = value {
                cmd = cmd.args([flag, value]);
            }
        }
        // Unit tests; those that need root stay ignored.
        let done = cmd.args(["--", "--lib"]).dir(workspace.root()).run();
        if done.is_err() {
            survived.push(part.package());
        }
    }
    if !survived.is_empty() {
        bail!(
            "no test notices some changes of {}: see target/mutants/*/mutants.out/missed.txt",
            survived.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_files() {
        let root = Workspace::find().unwrap().root().to_owned();
        for part in Part::ALL {
            for file in part.files() {
                let folder = file.split('*').next().unwrap();
                assert!(root.join(folder).exists() && folder.starts_with(part.package()), "{file}");
            }
        }
    }
}
