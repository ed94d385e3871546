//! Checks mounts and privileges.

use super::CheckLine;
use crate::cli::check::facts::Environment;
use crate::maps::sys;

pub(super) fn judge(environment: &Environment, pre: bool) -> Vec<CheckLine> {
    vec![cgroup(environment), bpffs(environment, pre), capabilities(environment)]
}

fn cgroup(environment: &Environment) -> CheckLine {
    const CHECK: &str = "cgroup2";
    match &environment.cgroup {
        Ok((path, whole)) if *whole || environment.cgroup_is_named => {
            CheckLine::pass(CHECK, format!("{} is mounted", path.display()))
        }
        Ok((path, _)) => CheckLine::warn(
            CHECK,
            format!(
                "{} is not the root of the cgroup tree: sockets outside it are not translated",
                path.display()
            ),
            "in a container, mount the host's /sys/fs/cgroup and give its path with --cgroup-root",
        ),
        Err(why) => CheckLine::fail(
            CHECK,
            why.clone(),
            "run `ballast run --init-only`, as the chart's init container does; it mounts one",
        ),
    }
}

fn bpffs(environment: &Environment, pre: bool) -> CheckLine {
    const CHECK: &str = "bpffs";
    let path = environment.bpffs.display();
    match (environment.has_bpffs, pre) {
        (true, _) => CheckLine::pass(CHECK, format!("{path} is a BPF file system")),
        (false, true) => CheckLine::warn(
            CHECK,
            format!("no BPF file system is mounted at {path}"),
            format!(
                "run `ballast run --init-only`, as the chart's init container does, or `mount -t bpf bpf {path}`"
            ),
        ),
        (false, false) => CheckLine::fail(CHECK, sys::no_bpffs(&environment.bpffs), sys::GIVE_BPFFS),
    }
}

fn capabilities(environment: &Environment) -> CheckLine {
    const CHECK: &str = "capabilities";
    if let Some(why) = environment.forbidden {
        return CheckLine::fail(CHECK, format!("this process has all capabilities, but {why}"), why.advice());
    }
    match &environment.missing_capabilities {
        Ok(missing) if missing.is_empty() => CheckLine::pass(CHECK, "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"),
        Ok(missing) => CheckLine::fail(
            CHECK,
            format!("this process lacks {}", missing.join(", ")),
            "run as root, or add these capabilities to the container",
        ),
        Err(why) => CheckLine::fail(
            CHECK,
            format!("cannot read the capabilities of this process: {why}"),
            "mount /proc",
        ),
    }
}
