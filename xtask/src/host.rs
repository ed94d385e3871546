//! Processes and control groups of this machine, for the demo and the cluster.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fs_err as fs;

/// How long a control group may stay busy after its last process has ended.
const GRACE: Duration = Duration::from_secs(2);

/// Sends a signal; ignores errors, because the process may have just ended by itself.
pub fn kill(process: libc::pid_t, signal: libc::c_int) {
    // SAFETY: kill takes numbers only.
    unsafe { libc::kill(process, signal) };
}

/// Removes a control group; tries again for a while, because it is busy for a moment after its last process has ended.
pub fn remove_cgroup(dir: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        match fs::remove_dir(dir) {
            Err(_) if start.elapsed() < GRACE => sleep(Duration::from_millis(20)),
            done => return Ok(done?),
        }
    }
}

/// Returns the names in a folder, sorted; no names if the folder does not exist.
pub fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Returns the start time of a process, as in `/proc/PID/stat`; `None` if the process does not exist or is a zombie.
pub fn start_of(process: u32) -> Option<String> {
    let fields = stat(process)?;
    (fields.first()? != "Z").then(|| fields.get(19).cloned())?
}

/// Returns the fields of `/proc/PID/stat` after the program's name.
fn stat(process: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name may contain any character, also brackets; the fields after it contain no brackets.
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// Returns the children of a process.
pub fn children_of(process: u32) -> BTreeSet<u32> {
    let all = names_in(Path::new("/proc")).into_iter().filter_map(|name| name.parse::<u32>().ok());
    all.filter(|&child| parent_of(child) == Some(process)).collect()
}

fn parent_of(process: u32) -> Option<u32> {
    stat(process)?.get(1)?.parse().ok()
}

/// A mounted hierarchy of control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Mount point.
    pub root: PathBuf,
    /// Whether the hierarchy is cgroup2.
    pub is_v2: bool,
}

/// Returns the mount point of cgroup2, also if hierarchies of cgroup v1 are mounted.
pub fn cgroup2() -> Result<PathBuf> {
    let found = hierarchies()?.into_iter().find(|hierarchy| hierarchy.is_v2).map(|hierarchy| hierarchy.root);
    found.context("no cgroup2 is mounted: `mount -t cgroup2 cgroup2 /sys/fs/cgroup`")
}

/// Returns all mounted hierarchies: with systemd's hybrid layout, those of cgroup v1 and cgroup2.
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(hierarchies_in(&mounts))
}

fn hierarchies_in(mounts: &str) -> Vec<Hierarchy> {
    let of = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (root, kind) = (PathBuf::from(fields.next()?), fields.next()?);
        ["cgroup", "cgroup2"].contains(&kind).then_some(Hierarchy { root, is_v2: kind == "cgroup2" })
    };
    mounts.lines().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let found: Vec<_> = hierarchies_in(mounts).into_iter().map(|one| (one.root, one.is_v2)).collect();
        let unified = PathBuf::from("/sys/fs/cgroup/unified");
        assert_eq!(found, [(PathBuf::from("/sys/fs/cgroup/cpu"), false), (unified, true)]);
    }
}
