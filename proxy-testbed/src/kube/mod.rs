//! A Kubernetes API server for tests: kube-apiserver and etcd without any controller, so that the cluster contains only what
//! a test creates.

pub mod api;
pub mod control;
pub mod kube_proxy;
pub mod manifests;
pub mod process;

use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::mount::{MountPropagationFlags, mount_change};

use control::{ADDRESS, ControlPlane, SECOND};

/// Timeout for what happens soon on an idle machine, or after the agent's longest pause between two attempts, which is 20 s.
/// This machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Whether the environment names kube-apiserver, etcd and kube-proxy.
pub fn is_there() -> bool {
    control::binaries().is_ok() && kube_proxy::binary().is_ok()
}

/// Connects a network namespace to the API server with a veth pair, whose end inside is `mgmt`. Returns the `ip` commands to run
/// inside, one per line. `number` must be unique for each namespace; `path` is the namespace's file.
pub fn connect_namespace(number: u8, path: &str) -> Result<String> {
    ip(&format!("link add m{number} type veth peer name mgmt netns {path}"))?;
    ip(&format!("addr add 10.255.{number}.1/24 dev m{number}"))?;
    ip(&format!("link set m{number} up"))?;
    Ok(format!(
        "addr add 10.255.{number}.2/24 dev mgmt\nlink set mgmt up\nroute add {ADDRESS}/32 via 10.255.{number}.1\n"
    ))
}

/// Moves this process to a network and mount namespace of its own, and starts the API server there.
pub fn begin() -> Result<ControlPlane> {
    // SAFETY: no other thread exists yet.
    if unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot unshare the network and the mounts");
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")?;
    start()
}

/// Starts the API server in this network namespace.
pub fn start() -> Result<ControlPlane> {
    ip("link set lo up")?;
    // The API server publishes its address as an endpoint, and does not accept 127.0.0.1 as one.
    ip(&format!("addr add {ADDRESS}/32 dev lo"))?;
    ip(&format!("addr add {SECOND}/32 dev lo"))?;
    ControlPlane::start()
}

/// Runs `ip` in this network namespace.
pub fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status().context("cannot run ip")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

/// Returns the last lines of a file.
pub fn tail(path: &Path) -> String {
    const LINES: usize = 60;
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Repeats `check` until it succeeds; after `patience`, returns its last error.
pub fn eventually<T>(patience: Duration, mut check: impl FnMut() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match check() {
            Ok(value) => return Ok(value),
            Err(error) if begun.elapsed() > patience => {
                return Err(error.context(format!("still so after {} s", patience.as_secs())));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
