//! Debian's packages: finds them, and installs them without starting services.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};

use crate::exec::{self, Cmd};
use crate::log;

/// Package scripts run this script before they start a service; exit status 101 forbids the start.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Whether this machine has apt at all.
pub fn exists() -> bool {
    exec::which("apt-get").is_some()
}

/// Whether apt can install the package, according to its lists.
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

/// Updates apt's lists, once per run.
pub fn update() -> Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        log::step("apt-get update");
        // Only a warning: the other sources may have the packages, and `apt-get install` reports a missing package.
        if let Err(error) = admin("apt-get")?.args(["-qq", "update"]).run() {
            log::line(format_args!("    warning: {error:#}"));
        }
        *done = true;
    }
    Ok(())
}

/// Installs packages without starting services.
pub fn install(packages: &[&str]) -> Result<()> {
    update()?;
    log::step(format_args!("apt-get install {}", packages.join(" ")));
    let _quiet = NoServices::new()?;
    // A fresh machine installs its updates by itself, and apt-get alone does not wait for the lock.
    admin("apt-get")?
        .args(["-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=600"])
        .args(["-qq", "-y", "--no-install-recommends", "install"])
        .args(packages)
        .run()
}

/// Returns a call as root: directly if we are root, else with `sudo`; an error if `sudo` is not installed.
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

/// Prevents package scripts from starting services until it is dropped.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn new() -> Result<Self> {
        // An existing policy stays.
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
