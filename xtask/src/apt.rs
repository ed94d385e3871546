//! Debian's packages: look, install without starting services.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};

use crate::exec::{self, Cmd};
use crate::log;

/// Asked by package scripts before they start a service; exit status 101 says no.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Whether this machine has apt at all.
#[must_use]
pub fn exists() -> bool {
    exec::which("apt-get").is_some()
}

/// Whether apt could install the package, as far as its lists say.
#[must_use]
pub fn offers(package: &str) -> bool {
    let policy =
        Cmd::new("apt-cache").env("LC_ALL", "C").args(["policy", package]).try_read().unwrap_or_default();
    candidate(&policy).is_some()
}

fn candidate(policy: &str) -> Option<&str> {
    policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))
        .filter(|version| *version != "(none)")
}

/// Brings apt's lists up to date, once in a run.
pub fn update() -> Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        log::step("apt-get update");
        // One unreachable source must not hide what the others have; a package that is missing says so itself.
        if let Err(error) = admin("apt-get")?.args(["-qq", "update"]).run() {
            log::line(format_args!("    warning: {error:#}"));
        }
        *done = true;
    }
    Ok(())
}

/// Installs packages; no service is started by it.
pub fn install(packages: &[&str]) -> Result<()> {
    update()?;
    log::step(format_args!("apt-get install {}", packages.join(" ")));
    let _quiet = NoServices::new()?;
    admin("apt-get")?
        .args(["-qq", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0", "install"])
        .args(packages)
        .run()
}

/// A call as root: plain when we are, by `sudo` when there is one.
fn admin(program: &str) -> Result<Cmd> {
    let frontend = "DEBIAN_FRONTEND=noninteractive";
    if exec::is_root() {
        Ok(Cmd::new("env").args([frontend, program]))
    } else if exec::which("sudo").is_some() {
        log::line(format_args!("    `{program}` needs root: asking sudo"));
        Ok(Cmd::new("sudo").args([frontend, program]))
    } else {
        bail!("`{program}` needs root, and sudo is not installed: run this once as root")
    }
}

/// Keeps package scripts from starting services, as long as it lives.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn new() -> Result<Self> {
        // A policy that was there before stays.
        let ours = !Path::new(POLICY).exists();
        if ours {
            let script = r#"printf '#!/bin/sh\nexit 101\n' >"$1" && chmod 755 "$1""#;
            admin("sh")?.args(["-c", script, "sh", POLICY]).run()?;
        }
        Ok(Self { ours })
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        let is_gone = !self.ours || admin("rm").is_ok_and(|rm| rm.arg(POLICY).run().is_ok());
        if !is_gone {
            log::line(format_args!("warning: {POLICY} is left behind; remove it"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_without_candidate_is_not_offered() {
        assert_eq!(candidate("x:\n  Installed: (none)\n  Candidate: (none)\n"), None);
        assert_eq!(candidate("x:\n  Installed: (none)\n  Candidate: 1.2-3\n"), Some("1.2-3"));
        assert_eq!(candidate(""), None);
    }
}
