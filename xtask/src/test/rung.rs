//! One rung of the tests: its description, its requirements and how it runs.

use std::ffi::OsString;
use std::path::Path;
use std::{fmt, fs};

use anyhow::{Result, bail};

use crate::apiserver;
use crate::workspace::Workspace;
use crate::{cross, exec};

/// The rungs, in the order they are run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Rung {
    /// Unit and property tests, and the packet code on the host
    Unit,
    /// The programs in the kernel, with single packets (needs root)
    Bpf,
    /// Real sockets in network namespaces (needs root)
    Netns,
    /// The agent with a real kube-apiserver, and compared with the official kube-proxy (needs root and Go)
    Apiserver,
}

/// Environment variables for a rung's tests.
pub(super) type Environment = Vec<(&'static str, OsString)>;

impl Rung {
    pub(super) const ALL: [Self; 4] = [Self::Unit, Self::Bpf, Self::Netns, Self::Apiserver];

    pub(super) fn what(self) -> &'static str {
        match self {
            Self::Unit => "unit and property tests",
            Self::Bpf => "the programs in the kernel, with single packets",
            Self::Netns => "real sockets in network namespaces",
            Self::Apiserver => {
                "the agent with a real kube-apiserver, and compared with the official kube-proxy"
            }
        }
    }

    /// Returns the environment variables for the rung's tests, or why the rung cannot run on this machine.
    pub(super) fn environment(
        self,
        workspace: &Workspace,
        api_server: Option<apiserver::Pending>,
    ) -> Result<Environment, String> {
        if self == Self::Unit {
            return Ok(Vec::new());
        }
        if !exec::is_root() {
            return Err(format!(
                "needs root, to load programs and make network namespaces; do: sudo -E env \"PATH=$PATH\" cargo xtask test {self}"
            ));
        }
        let mut environment = vec![("BALLAST_BIN", workspace.binary(false).into_os_string())];
        if let Some(pending) = api_server {
            let binaries = apiserver::wait(pending).map_err(|error| {
                let variables = apiserver::VARIABLES.join(" and ");
                format!("no API server to test against ({error:#}); set {variables}, or make `go` work")
            })?;
            environment.extend(binaries.environment().map(|(name, path)| (name, path.into())));
        }
        Ok(environment)
    }

    /// Runs the rung's tests on our terminal, one test program after the other, because they share this machine's kernel.
    pub(super) fn run(
        self,
        workspace: &Workspace,
        environment: &Environment,
        filter: &[String],
    ) -> Result<()> {
        if self == Self::Unit {
            // Without `--include-ignored`, the fuzz program runs only tests that need no kernel.
            return workspace
                .cargo_test()
                .args(["--lib", "--bins", "--test", "fuzz", "--"])
                .args(filter)
                .run();
        }
        let programs = self.programs(&integration_tests(&workspace.root().join("proxy-user/tests"))?);
        if programs.is_empty() {
            bail!("there is no test program for it");
        }
        for (program, first) in programs {
            let mut cargo = workspace.cargo_test().args(["--test", &program, "--"]).args(first);
            cargo = cargo.arg("--include-ignored");
            for (name, value) in environment {
                cargo = cargo.env(name, value);
            }
            cargo.args(filter).run()?;
        }
        if self == Self::RUNG_OF_ROOT_UNIT_TESTS {
            workspace.cargo_test().args(["--lib", "--", "--ignored"]).args(filter).run()?;
        }
        Ok(())
    }

    /// The rung that also runs the unit tests that need root.
    const RUNG_OF_ROOT_UNIT_TESTS: Self = Self::Netns;

    /// Returns the rung's integration tests, each with its first argument: the test with the rung's name; for `bpf` also all
    /// tests without a rung of their name; for `apiserver` also the cases of `netns` that need an API server (`--official`).
    fn programs(self, all: &[String]) -> Vec<(String, Option<&'static str>)> {
        let own = self.to_string();
        let others = |name: &String| Self::ALL.iter().all(|rung| rung.to_string() != *name);
        let mine = all.iter().filter(|name| **name == own || (self == Self::Bpf && others(name)));
        let beside_kube_proxy =
            (self == Self::Apiserver).then(|| (Self::Netns.to_string(), Some("--official")));
        mine.map(|name| (name.clone(), None)).chain(beside_kube_proxy).collect()
    }
}

/// Returns the names of a crate's integration tests, sorted: `x.rs` and `x/main.rs`.
fn integration_tests(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "rs") || path.join("main.rs").exists() {
            names.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
        }
    }
    names.sort();
    Ok(names)
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cross::name(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_integration_test_is_forgotten_or_run_twice() {
        let all = ["apiserver", "attach", "bpf", "netns"].map(str::to_owned);
        let whole = |name: &str| (name.to_owned(), None);
        assert_eq!(Rung::Bpf.programs(&all), [whole("attach"), whole("bpf")]);
        assert_eq!(Rung::Netns.programs(&all), [whole("netns")]);
        let beside = ("netns".to_owned(), Some("--official"));
        assert_eq!(Rung::Apiserver.programs(&all), [whole("apiserver"), beside]);
        assert!(Rung::Unit.programs(&all).is_empty());
    }

    /// Returns the rung that runs the ignored tests of this file; `None` if no rung does.
    fn rung_of(file: &Path, tests: &[String]) -> Option<Rung> {
        let Ok(test) = file.strip_prefix("proxy-user/tests") else {
            return Some(Rung::RUNG_OF_ROOT_UNIT_TESTS);
        };
        let program = test.iter().next()?;
        let program = Path::new(program).file_stem()?.to_str()?;
        Rung::ALL.into_iter().find(|rung| rung.programs(tests).iter().any(|(name, _)| name == program))
    }

    #[test]
    fn every_ignored_test_names_the_rung_that_runs_it() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let tests = integration_tests(&root.join("proxy-user/tests")).unwrap();
        let mut count = 0;
        for file in crate::lint::rust_files(&root).unwrap() {
            let marks = file.1.lines().filter_map(|line| line.trim().strip_prefix("#[ignore"));
            for mark in marks {
                let rung =
                    rung_of(&file.0, &tests).unwrap_or_else(|| panic!("{}: no rung", file.0.display()));
                let says = format!(" = \"needs root: cargo xtask test {rung}\"]");
                assert_eq!(mark, says, "{}", file.0.display());
                count += 1;
            }
        }
        assert!(count > 30, "{count}");
    }
}
