//! Errors of programs, pins and links; the messages say what to do.

use std::io;
use std::path::{Path, PathBuf};

use aya::EbpfError;
use aya::maps::MapError;
use aya::programs::ProgramError;

use super::forbidden::Forbidden;
use crate::maps::sys;

/// An error of [`programs`](crate::programs).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The binary has no BPF object inside.
    #[error("this binary was built without its BPF object; build it with `cargo xtask build`")]
    NoObject,
    /// The process may not load programs.
    #[error(
        "missing {0}: run as root, or grant CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (in Kubernetes: securityContext.capabilities.add)"
    )]
    Capabilities(String),
    /// bpf(2) is forbidden, although the process has all capabilities.
    #[error("{0}; {advice}", advice = .0.advice())]
    Forbidden(Forbidden),
    /// There is no bpffs, and none could be mounted.
    #[error(
        "{} is not a bpffs and mounting one there failed: {source}; run `mount -t bpf bpf {}` on the host, or give another directory with --bpffs", path.display(), path.display()
    )]
    Mount {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The node has objects of Ballast, but the directory that was given is no bpffs, which would have their pins.
    #[error(
        "{} is not a bpffs, so nothing was removed; this node has: {}. Give the --bpffs of the agent; if that bpffs is gone, mount one \
         (`mount -t bpf bpf {}`)", path.display(), found.join(", "), path.display()
    )]
    NoBpffs {
        /// The directory.
        path: PathBuf,
        /// What would be removed.
        found: Vec<String>,
    },
    /// The bpffs cannot be written to.
    #[error("{}", sys::read_only(mount))]
    ReadOnly {
        /// Its mount point.
        mount: PathBuf,
    },
    /// A user other than root may have written to a directory of pins.
    #[error(
        "{} {why}: a user who can write there can redirect traffic. Find out who created it and remove it (`rm -r {}`), or give another bpffs with --bpffs", path.display(), path.display()
    )]
    NotOurs {
        /// The directory.
        path: PathBuf,
        /// What is wrong with the directory.
        why: String,
    },
    /// Another process holds the lock.
    #[error(
        "{} is in use by another instance of Ballast; each {what} can have only one. Stop the other instance, or give this one its own with {flag}", path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The kind of directory.
        what: &'static str,
        /// The setting that gives another one.
        flag: &'static str,
    },
    /// Another agent serves the devices of this network namespace.
    #[error(
        "another instance of Ballast is attached to the devices of this network namespace; stop it, or exclude all devices with --devices '!*'"
    )]
    DevicesInUse,
    /// The path is not a cgroup2 directory.
    #[error(
        "{} is not in a file system of the type cgroup2 (`findmnt -t cgroup2` lists their mount points): give a directory of one with --cgroup-root, or remove the flag",
        path.display()
    )]
    NotCgroup2 {
        /// The path.
        path: PathBuf,
    },
    /// The cgroup was removed, and another one has its path now.
    #[error("the cgroup {} was removed and created again: its sockets are translated after a restart", path.display())]
    CgroupReplaced {
        /// The path.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel did not attach a program.
    #[error("cannot attach {program} to {place}: {source}{}", hint(source))]
    Attach {
        /// Name of the program.
        program: &'static str,
        /// The cgroup or device.
        place: String,
        /// The cause.
        source: io::Error,
    },
    /// Another filter has the priority and the handle of Ballast's filter on a device.
    #[error(
        "{device}: a foreign filter `{owner}` has priority {priority} and handle {handle:#x}; remove it with `tc filter del`"
    )]
    FilterTaken {
        /// The device.
        device: String,
        /// Name of the filter that has them.
        owner: String,
        /// Its priority.
        priority: u16,
        /// Its handle.
        handle: u32,
    },
    /// The BPF object lacks a map or program that this agent needs.
    #[error(
        "the BPF object has no {kind} `{name}`: it was built from other sources than this agent; rebuild with `cargo xtask build`"
    )]
    Incomplete {
        /// `map` or `program`.
        kind: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// The embedded object is not a valid BPF object.
    #[error("cannot read the BPF object: {0}")]
    Parse(#[from] aya_obj::ParseError),
    /// Maps could not be created or opened.
    #[error("cannot create or open the maps: {0}; if the kernel says ENOMEM, lower the --max-* settings")]
    Load(#[from] Box<EbpfError>),
    /// The kernel rejected a program.
    #[error("the kernel rejected the program {name}. {}{cause}", super::kernel::too_old())]
    Program {
        /// Its name.
        name: &'static str,
        /// The cause, with the verdict of the verifier, but without its log.
        cause: String,
    },
    /// The kernel's types (BTF) cannot be read.
    #[error(
        "cannot read the kernel's types in {path}: {source}; the kernel needs CONFIG_DEBUG_INFO_BTF, and the container needs /sys"
    )]
    NoBtf {
        /// The file with the types.
        path: &'static str,
        /// The cause.
        source: Box<aya_obj::btf::BtfError>,
    },
    /// A map could not be used.
    #[error("map {name}: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// The cause.
        source: MapError,
    },
    /// The clock program failed.
    #[error("cannot measure the kernel's clock: {0}")]
    Clock(String),
}

impl Error {
    /// Returns the error that the kernel rejected a program. The verifier's log goes to the log of the agent.
    pub(super) fn rejected(name: &'static str, error: &ProgramError) -> Self {
        if let ProgramError::LoadError { verifier_log, .. } = error {
            tracing::debug!(program = name, "log of the verifier:\n{verifier_log}");
        }
        Self::Program { name, cause: rejection(error) }
    }

    /// Returns a function for `map_err`, for a failed `action` on `path`.
    pub(super) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            Some(libc::EROFS) => Self::ReadOnly { mount: sys::mount_point(path) },
            _ => Self::File { action, path: path.to_owned(), source },
        }
    }
}

/// Returns the kernel's error, and the last line of the verifier's log, which says what is wrong; the log itself may have
/// thousands of lines.
fn rejection(error: &ProgramError) -> String {
    let ProgramError::LoadError { io_error, verifier_log } = error else { return error.to_string() };
    match verdict(&verifier_log.to_string()) {
        Some(verdict) => format!("{io_error}: {verdict} (the log level debug shows the verifier's log)"),
        None => io_error.to_string(),
    }
}

/// Returns the last line of a verifier's log that is not a statistic.
fn verdict(log: &str) -> Option<&str> {
    let is_statistic = |line: &&str| {
        ["processed ", "verification time", "stack depth"].iter().any(|start| line.starts_with(start))
    };
    log.lines().map(str::trim).filter(|line| !line.is_empty()).rev().find(|line| !is_statistic(line))
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        // The kernel allows 64 programs of a type on a cgroup, and as many on a device.
        Some(libc::E2BIG | libc::ERANGE) => "; too many programs are already attached there",
        Some(libc::EPERM) => {
            "; another program is attached exclusively, or CAP_NET_ADMIN is missing (see `bpftool cgroup tree`)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_read_only_bpffs_names_its_mount_point() {
        for pin in ["/proc/sys/net", "/proc/sys/missing/pin"] {
            let error = Error::file("pin", Path::new(pin))(io::Error::from_raw_os_error(libc::EROFS));
            let text = error.to_string();
            assert!(text.starts_with("/proc is mounted read-only;"), "{text}");
            assert!(text.contains("`mount -o remount,rw /proc`"), "{text}");
        }
    }

    #[test]
    fn a_rejected_program_tells_the_verdict_and_not_the_log() {
        let log = "0: R1=ctx() R10=fp0\n1: (61) r0 = *(u32 *)(r1 +0)\nR0 invalid mem access 'scalar'\n\
                   processed 2 insns (limit 1000000) max_states_per_insn 0\n";
        assert_eq!(verdict(log), Some("R0 invalid mem access 'scalar'"));
        assert_eq!(verdict("processed 2 insns\n"), None);
        assert_eq!(verdict(""), None);
    }
}
