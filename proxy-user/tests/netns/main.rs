//! Tests with real sockets in network namespaces, served by the real agent: `cargo xtask test netns`.
//!
//! Each case has its own fixture (`fixture.rs`), so that cases run in parallel. The traffic comes from this program itself,
//! started again inside the fixture (`peer/`). `--kernel-smoke` runs the few cases that show that a kernel accepts our programs,
//! and `--official` runs the cases beside the official kube-proxy, with an API server (`cargo xtask test apiserver`).

mod agent;
mod browser;
mod cases;
mod fixture;
#[path = "../../../proxy-cli/src/kubectl/mock.rs"]
#[expect(clippy::unwrap_used, reason = "unit tests share it")]
mod mock;
mod nodes;
mod peer;
mod raw;
mod verify;

use std::fs;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::mount::{MountPropagationFlags, mount_change};

use cases::Case;
use fixture::Fixture;
use proxy_testbed::kube;

/// Number of cases that run in parallel: they wait more than they compute.
const AT_ONCE: usize = 4;

fn main() -> ExitCode {
    let first = std::env::args().nth(1).unwrap_or_default();
    if first == peer::ARGUMENT {
        return peer::work::run();
    }
    let is_smoke = first == "--kernel-smoke";
    // The console of the emulated machine is a terminal, but its output ends in a log.
    let smoke = ["netns", "--nocapture", "--color=never"];
    let is_official = first == "--official";
    let mut arguments = match (is_smoke, is_official) {
        (true, _) => Arguments::from_iter(smoke),
        (_, true) => Arguments::from_iter(std::env::args().filter(|argument| *argument != first)),
        _ => Arguments::from_args(),
    };
    let is_root = rustix::process::geteuid().is_root();
    let _backlog = is_root.then(Backlog::raise);
    if is_root && !arguments.list {
        if let Err(error) = own_mounts() {
            let _ = writeln!(io::stderr(), "netns: {error:#}");
            return ExitCode::FAILURE;
        }
        fixture::remove_leftovers();
    }
    // An emulated machine is slow enough with one case at a time, and the official cases share one API server.
    let at_once = if is_smoke || is_official { 1 } else { AT_ONCE };
    arguments.test_threads = arguments.test_threads.or(Some(at_once));
    let cases = match (is_smoke, is_official) {
        (true, _) => cases::smoke(),
        (_, true) => cases::official(),
        _ => cases::all(),
    };
    let can_run = is_root && (!is_official || kube::is_there());
    // Without root, the cases are listed as ignored, like the other tests that need more.
    let trial = |case: Case| {
        Trial::test(case.name, move || run(&case).map_err(|error| Failed::from(format!("{error:#}"))))
            .with_ignored_flag(!can_run)
    };
    let of_nodes = match (is_smoke, is_official) {
        (true, _) => cases::smoke_with_own_setup(),
        (_, true) => cases::official_on_three_nodes(),
        _ => cases::on_three_nodes(),
    };
    let of_nodes = of_nodes.into_iter().map(|case| {
        let run = move || guarded(case.run).map_err(|error| Failed::from(format!("{error:#}")));
        Trial::test(case.name, run).with_ignored_flag(!can_run)
    });
    libtest_mimic::run(&arguments, of_nodes.chain(cases.into_iter().map(trial)).collect()).exit_code()
}

/// Length of the queue in which the packets of all veth devices wait for a CPU. If a bulk transfer of one case fills it, packets
/// of other cases are lost.
const BACKLOG: &str = "/proc/sys/net/core/netdev_max_backlog";

/// The length that the queue had before.
struct Backlog(Option<String>);

impl Backlog {
    fn raise() -> Self {
        let before = fs::read_to_string(BACKLOG).ok();
        let is_short = |before: &String| before.trim().parse().is_ok_and(|length: u32| length < 65_536);
        Self(before.filter(|before| is_short(before) && fs::write(BACKLOG, "65536").is_ok()))
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = fs::write(BACKLOG, before);
        }
    }
}

/// Moves this process into its own mount namespace, so that the mounts of a test disappear with the process, however it ends.
fn own_mounts() -> Result<()> {
    // SAFETY: the process still has only this thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot unshare mounts");
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("cannot make the mounts private")
}

/// Runs the action, and returns a panic as an error.
fn guarded(action: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| Err(anyhow!("a panic, see above")))
}

fn run(case: &Case) -> Result<()> {
    let fixture = Fixture::new(case.wish)?;
    let action = || fixture.begin().and_then(|()| (case.run)(&fixture));
    guarded(action).map_err(|error| {
        let (reasons, state, log) = (fixture.reasons(), fixture.state(), fixture.log());
        anyhow!(
            "{error:#}\n--- reasons ---\n{reasons}\n--- the agent ---\n{state}\n--- the agents' log ---\n{log}"
        )
    })
}
