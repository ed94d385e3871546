//! The agent against a real API server: `cargo xtask test apiserver`.
//!
//! This program lives in a network namespace and among mounts of its own, so ports and addresses are fixed. One
//! kube-apiserver with its etcd serves all cases, one after the other: starting it costs seconds. No controller
//! runs, so what is in the cluster is what a case puts there. After each step the agent's maps are read back and
//! compared with what the API server holds (`oracle.rs`).

mod agent;
mod api;
mod cases;
mod control;
mod oracle;
mod process;

use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::mount::{MountPropagationFlags, mount_change};

use agent::Node;
use cases::{CASES, Case};
use control::{ADDRESS, ControlPlane};

/// For whatever happens soon on an idle machine, or after the longest pause between two attempts of the agent, which
/// is 20 s. This machine may be busy.
const PATIENCE: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // They share one API server.
    arguments.test_threads = Some(1);
    let can_run = rustix::process::geteuid().is_root() && control::binaries().is_ok();
    let control = Arc::new(Mutex::new(None));
    if can_run && !arguments.list {
        match begin() {
            Ok(started) => *lock(&control) = Some(started),
            Err(error) => {
                let _ = writeln!(io::stderr(), "apiserver: {error:#}");
                return ExitCode::FAILURE;
            }
        }
    }
    let trial = |case: &'static Case| {
        let control = Arc::clone(&control);
        let action = move || run(case, &control).map_err(|error| Failed::from(format!("{error:#}")));
        // Without root or without an API server they show as ignored, like the other tests that need more.
        Trial::test(case.name, action).with_ignored_flag(!can_run)
    };
    let conclusion = libtest_mimic::run(&arguments, CASES.iter().map(trial).collect());
    // Processes and folders go before this program does.
    lock(&control).take();
    conclusion.exit_code()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Leaves the machine's network and mounts, and starts the API server.
fn begin() -> Result<ControlPlane> {
    // SAFETY: there is only this thread yet.
    if unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot unshare the network and the mounts");
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")?;
    ip("link set lo up")?;
    // The API server announces its address as an endpoint, and refuses 127.0.0.1 as such.
    ip(&format!("addr add {ADDRESS}/32 dev lo"))?;
    ControlPlane::start()
}

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status().context("cannot run ip")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

fn run(case: &Case, control: &Mutex<Option<ControlPlane>>) -> Result<()> {
    let mut guard = lock(control);
    let control = guard.as_mut().context("there is no API server")?;
    control.reset()?;
    let node = Node::new(&control.agent_kubeconfig())?;
    let action = || (case.run)(control, &node);
    let result =
        catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| Err(anyhow!("a panic, see above")));
    result.map_err(|error| anyhow!("{error:#}\n--- the agents' log, its end ---\n{}", tail(&node.log_file())))
}

/// The last lines of a file.
fn tail(path: &Path) -> String {
    const LINES: usize = 60;
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Waits until `check` is content; its last complaint becomes the error.
fn eventually<T>(patience: Duration, mut check: impl FnMut() -> Result<T>) -> Result<T> {
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
