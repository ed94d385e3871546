//! `ballast run` where it does one thing and ends: `--init-only`, `--write-config-to`.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::statfs;
use rustix::mount::{UnmountFlags, unmount};

use super::{Case, WEB, capabilities, vip};
use crate::agent;
use crate::lab::{Lab, SMALL, Wish};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind};

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "init::an_init_container_does_what_takes_privileges", wish: WISH, run: init },
    Case { name: "init::the_settings_in_force_are_written", wish: WISH, run: write },
];

/// `BPF_FS_MAGIC`.
const BPFFS: i64 = 0xcafe_4a11;
/// Below `/proc/sys`; each network namespace has its own.
const CLOSE_WAIT: &str = "net/netfilter/nf_conntrack_tcp_timeout_close_wait";

/// Runs the program; what it says, which is its log.
fn run(lab: &Lab, arguments: &[&str]) -> Result<(String, bool)> {
    let manifests = lab.folder.dir().display().to_string();
    let arguments: Vec<_> =
        ["run", "--manifests", &manifests].into_iter().chain(arguments.iter().copied()).collect();
    let output = agent::command(&lab.node, &arguments, &lab.bpffs())?;
    Ok((String::from_utf8_lossy(&output.stderr).into_owned(), output.status.success()))
}

fn is_mounted(lab: &Lab) -> bool {
    statfs(lab.bpffs()).is_ok_and(|found| found.f_type == BPFFS)
}

fn init(lab: &Lab) -> Result<()> {
    lab.kill()?;
    let fresh = lab.bpffs().with_file_name("fresh");
    fs::create_dir(&fresh)?;
    lab.setup().bpffs = fresh;
    ensure!(!is_mounted(lab), "mounted already");
    let cgroup = lab.cgroup().display().to_string();
    let arguments = ["--init-only", "--cgroup-root", &cgroup, "--conntrack-tcp-timeout-close-wait", "17m"];
    let read = || {
        lab.node
            .inside(|| Ok(fs::read_to_string(format!("/proc/sys/{CLOSE_WAIT}"))?.trim().parse::<u32>()?))
    };
    let before = read()?;
    ensure!(before != 17 * 60, "it is set already");
    for time in ["mounted", "was there"] {
        let (said, well) = run(lab, &arguments)?;
        ensure!(well && said.contains(&format!("bpffs=\"{time}\"")), "{said}");
        ensure!(is_mounted(lab), "no bpffs: {said}");
        ensure!(read()? == 17 * 60, "{CLOSE_WAIT} is {}: {said}", read()?);
        ensure!(!lab.bpffs().join("ballast").exists(), "something is pinned: {said}");
    }
    // What is left for the agent takes no more than the lean chart gives it.
    capabilities::restrict(lab, capabilities::LEAN.into_iter())?;
    lab.begin()?;
    lab.client.reach(Attempt::new(Kind::Tcp, vip(Family::V4, WEB, Kind::Tcp)))?;
    lab.kill()?;
    unmount(lab.bpffs(), UnmountFlags::DETACH).context("cannot unmount")
}

fn write(lab: &Lab) -> Result<()> {
    lab.kill()?;
    let file = |name: &str| lab.bpffs().with_file_name(name).display().to_string();
    let [given, first, second] = ["given.yaml", "first.yaml", "second.yaml"].map(file);
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
                ipvs: {scheduler: sh, syncPeriod: 90s}\nhostnameOverride: node-b\nnodePortAddresses: [10.0.0.0/8]\n";
    fs::write(&given, text)?;
    let begun = lab.log().len();
    for (from, to) in [(&given, &first), (&first, &second)] {
        let (said, well) = run(lab, &["--config", from, "--write-config-to", to])?;
        ensure!(well, "{said}");
    }
    let written = fs::read_to_string(&first).context("nothing was written")?;
    for line in
        ["mode: \"ipvs\"", "  scheduler: \"sh\"", "  syncPeriod: \"1m30s\"", "hostnameOverride: \"node-b\""]
    {
        ensure!(written.lines().any(|found| found == line), "no line {line:?} in\n{written}");
    }
    ensure!(written == fs::read_to_string(&second)?, "what was read back is something else");
    ensure!(lab.log().len() == begun, "an agent has run");
    let (said, well) = run(lab, &["--write-config-to", "/proc/nowhere/file"])?;
    ensure!(!well && said.contains("/proc/nowhere/file"), "{said}");
    Ok(())
}
