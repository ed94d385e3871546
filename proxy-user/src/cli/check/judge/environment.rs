//! Checks mounts and privileges.

use super::Line;
use crate::cli::check::facts::Environment;

pub(super) fn judge(environment: &Environment, pre: bool) -> Vec<Line> {
    vec![cgroup(environment), bpffs(environment, pre), capabilities(environment)]
}

fn cgroup(environment: &Environment) -> Line {
    const CHECK: &str = "cgroup2";
    match &environment.cgroup {
        Ok((path, whole)) if *whole || environment.cgroup_is_named => {
            Line::pass(CHECK, format!("{} is mounted", path.display()))
        }
        Ok((path, _)) => Line::warn(
            CHECK,
            format!(
                "{} is not the root of the cgroup tree: sockets outside it are not translated",
                path.display()
            ),
            "in a container, mount the host's /sys/fs/cgroup and give its path with --cgroup-root",
        ),
        Err(why) => Line::fail(
            CHECK,
            why.clone(),
            "run `ballast run --init-only`, as the chart's init container does; it mounts one",
        ),
    }
}

fn bpffs(environment: &Environment, pre: bool) -> Line {
    const CHECK: &str = "bpffs";
    let path = environment.bpffs.display();
    match (environment.has_bpffs, pre) {
        (true, _) => Line::pass(CHECK, format!("{path} is a BPF file system")),
        (false, true) => Line::warn(
            CHECK,
            format!("no BPF file system is mounted at {path}"),
            format!(
                "run `ballast run --init-only`, as the chart's init container does, or `mount -t bpf bpf {path}`"
            ),
        ),
        (false, false) => Line::fail(
            CHECK,
            format!("no BPF file system is mounted at {path}: pinned maps and programs cannot be read"),
            "give the mount point that the agent uses with --bpffs; in a container, mount the host's BPF file system",
        ),
    }
}

fn capabilities(environment: &Environment) -> Line {
    const CHECK: &str = "capabilities";
    match &environment.missing_capabilities {
        Ok(missing) if missing.is_empty() => Line::pass(CHECK, "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"),
        Ok(missing) => Line::fail(
            CHECK,
            format!("this process lacks {}", missing.join(", ")),
            "run as root, or add these capabilities to the container",
        ),
        Err(why) => {
            Line::fail(CHECK, format!("cannot read the capabilities of this process: {why}"), "mount /proc")
        }
    }
}
