//! One rung: what it shows, what it needs, how it is run.

use std::ffi::OsString;
use std::fmt;

use anyhow::Result;

use super::Skip;
use crate::apiserver;
use crate::exec::{self, Cmd};
use crate::workspace::Workspace;

/// The rungs, in the order they are run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Rung {
    /// Unit and property tests, and the packet code on the host
    Unit,
    /// The programs in the kernel, packet by packet (needs root)
    Bpf,
    /// Real sockets in network namespaces (needs root)
    Netns,
    /// The agent against a real kube-apiserver (needs root and Go)
    Apiserver,
}

/// Environment variables for a rung's tests.
pub(super) type Environment = Vec<(&'static str, OsString)>;

impl Rung {
    pub(super) const ALL: [Self; 4] = [Self::Unit, Self::Bpf, Self::Netns, Self::Apiserver];

    pub(super) fn what(self) -> &'static str {
        match self {
            Self::Unit => "unit and property tests",
            Self::Bpf => "the programs in the kernel, packet by packet",
            Self::Netns => "real sockets in network namespaces",
            Self::Apiserver => "the agent against a real kube-apiserver",
        }
    }

    /// What its tests are told; or why it cannot run here.
    pub(super) fn environment(
        self,
        workspace: &Workspace,
        api_server: Option<apiserver::Pending>,
    ) -> Result<Environment, Skip> {
        if self == Self::Unit {
            return Ok(Vec::new());
        }
        if !exec::is_root() {
            return Err(Skip {
                why: "needs root, to load programs and make network namespaces".into(),
                what_to_do: format!("do: sudo -E env \"PATH=$PATH\" cargo xtask test {self}"),
            });
        }
        let mut environment = vec![("BALLAST_BIN", workspace.binary(false).into_os_string())];
        if let Some(pending) = api_server {
            let binaries = pending.wait().map_err(|error| Skip {
                why: format!("no API server to test against ({error:#})"),
                what_to_do: format!("set {}, or make `go` work", apiserver::VARIABLES.join(" and ")),
            })?;
            environment.extend(binaries.environment().map(|(name, path)| (name, path.into())));
        }
        Ok(environment)
    }

    /// Runs its tests on our terminal.
    pub(super) fn run(
        self,
        workspace: &Workspace,
        environment: &Environment,
        filter: &[String],
    ) -> Result<()> {
        let mut cargo = Cmd::cargo().arg("test").dir(workspace.root());
        cargo = match self {
            Self::Unit => cargo.args(["--workspace", "--lib", "--bins"]),
            _ => cargo.args(["-p", "proxy-user", "--test", &self.to_string()]),
        };
        for (name, value) in environment {
            cargo = cargo.env(name, value);
        }
        cargo.arg("--").args(filter).run()
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unit => "unit",
            Self::Bpf => "bpf",
            Self::Netns => "netns",
            Self::Apiserver => "apiserver",
        })
    }
}
