//! The network namespaces of this machine's processes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};

/// The network namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// Network namespaces, as far as they are visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// One path to each namespace; the caller's own comes first.
    pub paths: Vec<PathBuf>,
    /// The number of processes that this one may not inspect (`ptrace(2)`, "access mode checking"): they may be in
    /// other namespaces.
    pub hidden: usize,
}

/// Whether this process may find and enter other network namespaces (`/proc/PID/ns`, `setns(2)`).
pub fn may_enter() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// Returns only the caller's own network namespace.
pub fn own() -> Namespaces {
    Namespaces { paths: vec![OWN.into()], hidden: 0 }
}

/// Returns every network namespace that a process is in.
///
/// Namespaces of processes that are not in this `/proc` (in a container without the host's processes) are missing, and
/// so are namespaces without a process.
pub fn all() -> io::Result<Namespaces> {
    let own = Path::new(OWN).metadata()?.ino();
    let (mut others, mut hidden) = (BTreeMap::new(), 0);
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            let path = entry.path().join("ns/net");
            match path.metadata() {
                Ok(metadata) if metadata.ino() == own => {}
                Ok(metadata) => drop(others.entry(metadata.ino()).or_insert(path)),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    // The first process is the machine's own, and may be protected.
                    hidden += usize::from(name != "1");
                }
                // The process has ended in the meantime.
                Err(_) => {}
            }
        }
    }
    let paths = [PathBuf::from(OWN)].into_iter().chain(others.into_values()).collect();
    Ok(Namespaces { paths, hidden })
}

/// Runs `work` in each of these namespaces, on a separate thread that ends afterwards. `work` gets the result of
/// entering the namespace. The first path is assumed to be the caller's own, which needs no permission.
pub fn in_each<T: Send>(paths: &[PathBuf], mut work: impl FnMut(io::Result<()>) -> T + Send) -> Vec<T> {
    let run = || {
        let visit = |(number, path): (usize, &PathBuf)| work(if number == 0 { Ok(()) } else { enter(path) });
        paths.iter().enumerate().map(visit).collect()
    };
    // A panic of `work` has been reported already.
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap_or_default()
}

fn enter(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_namespace_comes_first_and_once() {
        let Namespaces { paths: all, .. } = all().unwrap();
        let inodes: Vec<_> = all.iter().filter_map(|path| Some(path.metadata().ok()?.ino())).collect();
        let own = Path::new("/proc/self/ns/net").metadata().unwrap().ino();
        assert_eq!(inodes.first(), Some(&own));
        assert_eq!(inodes.iter().filter(|inode| **inode == own).count(), 1);
    }

    #[test]
    fn visitor_gets_the_result_of_entering_the_namespace() {
        let paths = [PathBuf::from(OWN), PathBuf::from("/nowhere")];
        let told = in_each(&paths, |entered| entered.map_err(|error| error.kind()));
        assert_eq!(told, [Ok(()), Err(io::ErrorKind::NotFound)]);
    }
}
