//! The agent against a real API server: `cargo xtask test apiserver`.
//!
//! This program runs in its own network and mount namespace, so ports and addresses are fixed. All cases share one
//! kube-apiserver with its etcd, one case after the other: starting them takes seconds. No controller runs, so the cluster
//! contains only what a case creates. After each step, a case compares the agent's maps with the API server's objects
//! (`oracle.rs`).

mod agent;
mod cases;
mod oracle;

use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, anyhow};
use libtest_mimic::{Arguments, Failed, Trial};

use agent::{NODE, Node};
use cases::{CASES, Case, audit};
use proxy_testbed::kube;
use proxy_testbed::kube::control::{self, ControlPlane};
use proxy_testbed::kube::tail;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // All cases share one API server.
    arguments.test_threads = Some(1);
    let can_run = rustix::process::geteuid().is_root() && control::binaries().is_ok();
    let control = Arc::new(Mutex::new(None));
    if can_run && !arguments.list {
        match kube::begin() {
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
        // Without root or without an API server, the cases are listed as ignored, like the other tests with such requirements.
        Trial::test(case.name, action).with_ignored_flag(!can_run)
    };
    let conclusion = libtest_mimic::run(&arguments, CASES.iter().map(trial).collect());
    // Ends the processes and removes the folders before this program ends.
    lock(&control).take();
    conclusion.exit_code()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn run(case: &Case, control: &Mutex<Option<ControlPlane>>) -> Result<()> {
    let mut guard = lock(control);
    let control = guard.as_mut().context("there is no API server")?;
    control.reset()?;
    control.api.create_node(NODE)?;
    let node = Node::new(&control.agent_kubeconfig())?;
    let action = || {
        (case.run)(control, &node)?;
        audit::found_nothing(case, &node)
    };
    let result =
        catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| Err(anyhow!("a panic, see above")));
    result.map_err(|error| anyhow!("{error:#}\n--- the agents' log, its end ---\n{}", tail(&node.log_file())))
}
