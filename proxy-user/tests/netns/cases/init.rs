//! `ballast run` with flags for one task, after which it exits: `--init-only`, `--write-config-to`.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::statfs;
use rustix::mount::{UnmountFlags, unmount};

use super::{Case, WEB, capabilities, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, Wish};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "init::an_init_container_does_what_takes_privileges", wish: WISH, run: init },
    Case { name: "init::the_settings_in_effect_are_written", wish: WISH, run: write },
];

/// `BPF_FS_MAGIC`.
const BPFFS: i64 = 0xcafe_4a11;
/// A sysctl below `/proc/sys`; each network namespace has its own.
const CLOSE_WAIT: &str = "net/netfilter/nf_conntrack_tcp_timeout_close_wait";

/// Runs the program; returns its log, and whether it succeeded.
fn run(fixture: &Fixture, arguments: &[&str]) -> Result<(String, bool)> {
    let manifests = fixture.folder.dir().display().to_string();
    let arguments: Vec<_> =
        ["run", "--manifests", &manifests].into_iter().chain(arguments.iter().copied()).collect();
    let output = agent::command(&fixture.node, &arguments, &fixture.bpffs())?;
    Ok((String::from_utf8_lossy(&output.stderr).into_owned(), output.status.success()))
}

fn is_mounted(fixture: &Fixture) -> bool {
    statfs(fixture.bpffs()).is_ok_and(|found| found.f_type == BPFFS)
}

fn init(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let old = fixture.bpffs();
    let fresh = old.with_file_name("fresh");
    fs::create_dir(&fresh)?;
    fixture.setup().bpffs = fresh;
    ensure!(!is_mounted(fixture), "mounted already");
    let cgroup = fixture.cgroup().display().to_string();
    let arguments = ["--init-only", "--cgroup-root", &cgroup, "--conntrack-tcp-timeout-close-wait", "17m"];
    let read = || {
        fixture
            .node
            .inside(|| Ok(fs::read_to_string(format!("/proc/sys/{CLOSE_WAIT}"))?.trim().parse::<u32>()?))
    };
    let before = read()?;
    ensure!(before != 17 * 60, "it is set already");
    // The programs of the first agent are pinned in the bpffs that was configured before.
    let (said, well) = run(fixture, &arguments)?;
    let way_out = format!("ballast cleanup --bpffs {}", old.display());
    ensure!(!well && said.contains(&way_out), "{said}");
    let cleaned = agent::command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &old)?;
    ensure!(cleaned.status.success(), "{}", String::from_utf8_lossy(&cleaned.stderr));
    unmount(fixture.bpffs(), UnmountFlags::DETACH).context("cannot unmount")?;
    for time in ["mounted", "already mounted"] {
        let (said, well) = run(fixture, &arguments)?;
        ensure!(well && said.contains(&format!("bpffs=\"{time}\"")), "{said}");
        ensure!(is_mounted(fixture), "no bpffs: {said}");
        ensure!(read()? == 17 * 60, "{CLOSE_WAIT} is {}: {said}", read()?);
        ensure!(!fixture.bpffs().join("ballast").exists(), "something is pinned: {said}");
    }
    // After the init run, the agent needs only the capabilities that the chart gives it.
    capabilities::restrict(fixture, capabilities::AGENT_CAPABILITIES.into_iter())?;
    fixture.begin()?;
    fixture.client.reach(Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp)))?;
    fixture.kill()?;
    unmount(fixture.bpffs(), UnmountFlags::DETACH).context("cannot unmount")
}

fn write(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let file = |name: &str| fixture.bpffs().with_file_name(name).display().to_string();
    let [given, first, second] = ["given.yaml", "first.yaml", "second.yaml"].map(file);
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
                ipvs: {scheduler: sh, syncPeriod: 90s}\nhostnameOverride: node-b\nnodePortAddresses: [10.0.0.0/8]\n";
    fs::write(&given, text)?;
    let begun = fixture.log().len();
    for (from, to) in [(&given, &first), (&first, &second)] {
        let (said, well) = run(fixture, &["--config", from, "--write-config-to", to])?;
        ensure!(well, "{said}");
    }
    let written = fs::read_to_string(&first).context("nothing was written")?;
    for line in
        ["mode: \"ipvs\"", "  scheduler: \"sh\"", "  syncPeriod: \"1m30s\"", "hostnameOverride: \"node-b\""]
    {
        ensure!(written.lines().any(|found| found == line), "no line {line:?} in\n{written}");
    }
    ensure!(written == fs::read_to_string(&second)?, "what was read back is something else");
    ensure!(fixture.log().len() == begun, "an agent has run");
    let (said, well) = run(fixture, &["--write-config-to", "/proc/nowhere/file"])?;
    ensure!(!well && said.contains("/proc/nowhere/file"), "{said}");
    Ok(())
}
