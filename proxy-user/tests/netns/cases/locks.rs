//! Processes without privileges in the node's network namespace, as a pod with `hostNetwork` has them, cannot take the agent's
//! locks.

use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use proxy_user::host::netfilter::lock;

use super::{Case, EMPTY, WEB, vip};
use crate::agent::{Agent, command};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB, EMPTY], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "locks::process_without_privileges_stops_no_agent", wish: WISH, run: unprivileged },
    Case { name: "locks::second_agent_with_another_bpffs_is_refused", wish: WISH, run: second },
];

/// Flags of `setpriv` for a user without capabilities, and for root without capabilities.
const USER: &[&str] = &["--reuid", "65534", "--regid", "65534", "--clear-groups"];
const ROOT: &[&str] = &[];
const NOTHING: &[&str] = &["--inh-caps=-all", "--bounding-set=-all"];

/// A process; dropping it ends the process.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Locks a file by a process on the node.
fn flock(fixture: &Fixture, user: &[&str], path: &Path) -> Result<Process> {
    let mut process = fixture.node.command("setpriv");
    process.args(user).args(NOTHING).args(["flock", "--no-fork"]).arg(path).args(["sleep", "600"]);
    let process = Process(process.spawn().context("cannot start setpriv")?);
    eventually(SOON, || {
        let free = fixture.node.command("flock").arg("-n").arg(path).arg("true").status()?;
        ensure!(!free.success(), "{} is not locked", path.display());
        Ok(())
    })?;
    Ok(process)
}

fn unprivileged(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let id = std::os::unix::fs::MetadataExt::ino(&fixture.cgroup().metadata()?);
    let names = ["ballast-devices".to_owned(), format!("ballast-cgroup-{id}")];
    for (user, name) in [USER, ROOT].into_iter().flat_map(|user| names.each_ref().map(|name| (user, name))) {
        let mut table = fixture.node.command("setpriv");
        table.args(user).args(NOTHING).args(["nft", "add", "table", "ip", name]).stderr(Stdio::null());
        ensure!(!table.status()?.success(), "{user:?} has created {name}");
    }
    let _held =
        [flock(fixture, USER, Path::new("/proc/self/ns/net"))?, flock(fixture, USER, fixture.cgroup())?];
    fixture.begin()?;
    let (_space, late) = fixture.add_client()?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let to = vip(family, WEB, kind);
            eventually(SOON, || late.reach(Attempt::new(kind, to)))?;
            fixture.local.reach(Attempt::new(kind, to))?;
        }
        // By the programs: the kernel alone knows no such address.
        late.fails(Attempt::new(SocketKind::Tcp, vip(family, EMPTY, SocketKind::Tcp)), libc::ECONNREFUSED)?;
    }
    fixture.node.inside(|| {
        ensure!(names.iter().all(|name| lock::is_held(name)), "the agent has not all of its locks");
        Ok(())
    })?;
    fixture.kill()?;
    let cgroup = fixture.cgroup().display().to_string();
    let cleaned = command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &fixture.bpffs())?;
    ensure!(cleaned.status.success() && !fixture.bpffs().join("ballast").exists(), "{cleaned:?}");
    Ok(())
}

fn second(fixture: &Fixture) -> Result<()> {
    let mut other = fixture.setup().clone();
    other.bpffs = other.bpffs.with_file_name("other");
    std::fs::create_dir(&other.bpffs)?;
    let said = Agent::start(&fixture.node, &other)?.fails()?;
    ensure!(
        said.contains("is in use by another instance of Ballast; each cgroup can have only one"),
        "{said}"
    );
    // The lock ends with its agent, however that ends.
    fixture.restart()
}
