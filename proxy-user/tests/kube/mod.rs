//! A Kubernetes API server for tests: one program each for the server and its store, and no controller, so that what
//! is in the cluster is what a test puts there.

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

/// For whatever happens soon on an idle machine, or after the longest pause between two attempts of the agent, which
/// is 20 s. This machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Whether the programs are there.
pub fn is_there() -> bool {
    control::binaries().is_ok() && kube_proxy::binary().is_ok()
}

/// Gives a network namespace a way to the API server, by a device `mgmt`: returns what `ip` has to do inside.
/// `number` is its own, `path` is where the kernel shows it.
pub fn way_from(number: u8, path: &str) -> Result<String> {
    ip(&format!("link add m{number} type veth peer name mgmt netns {path}"))?;
    ip(&format!("addr add 10.255.{number}.1/24 dev m{number}"))?;
    ip(&format!("link set m{number} up"))?;
    Ok(format!(
        "addr add 10.255.{number}.2/24 dev mgmt\nlink set mgmt up\nroute add {ADDRESS}/32 via 10.255.{number}.1\n"
    ))
}

/// Leaves the machine's network and mounts, and starts the API server.
pub fn begin() -> Result<ControlPlane> {
    // SAFETY: there is only this thread yet.
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
    // The API server announces its address as an endpoint, and refuses 127.0.0.1 as such.
    ip(&format!("addr add {ADDRESS}/32 dev lo"))?;
    ip(&format!("addr add {SECOND}/32 dev lo"))?;
    ControlPlane::start()
}

/// Runs `ip` here.
pub fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status().context("cannot run ip")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

/// The last lines of a file.
pub fn tail(path: &Path) -> String {
    const LINES: usize = 60;
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Waits until `check` is content; its last complaint becomes the error.
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
