//! The network namespaces of this machine's processes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The one of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// Every network namespace that a process is in, once, by a path that leads to it; the caller's own comes first.
///
/// What belongs to processes that this one does not see (in a container without the host's processes) is missing, and
/// so is a namespace in which no process is.
pub fn all() -> io::Result<Vec<PathBuf>> {
    let own = Path::new(OWN).metadata()?.ino();
    let mut others = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            let path = entry.path().join("ns/net");
            // A process that has ended meanwhile has none, and a kernel thread's may not be looked at.
            if let Ok(metadata) = path.metadata()
                && metadata.ino() != own
            {
                others.entry(metadata.ino()).or_insert(path);
            }
        }
    }
    Ok([PathBuf::from(OWN)].into_iter().chain(others.into_values()).collect())
}

/// Runs `work` in each of these namespaces, on a thread of its own, which ends with it. `work` is told how it got in:
/// the first path is taken for the caller's own, which needs no permission.
pub fn in_each<T: Send>(paths: &[PathBuf], mut work: impl FnMut(io::Result<()>) -> T + Send) -> Vec<T> {
    let run = || {
        let visit = |(number, path): (usize, &PathBuf)| work(if number == 0 { Ok(()) } else { enter(path) });
        paths.iter().enumerate().map(visit).collect()
    };
    // A panic of `work` has been told; there is nothing to add to it.
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
        let all = all().unwrap();
        let inodes: Vec<_> = all.iter().filter_map(|path| Some(path.metadata().ok()?.ino())).collect();
        let own = Path::new("/proc/self/ns/net").metadata().unwrap().ino();
        assert_eq!(inodes.first(), Some(&own));
        assert_eq!(inodes.iter().filter(|inode| **inode == own).count(), 1);
    }

    #[test]
    fn work_is_told_how_it_got_in() {
        let paths = [PathBuf::from(OWN), PathBuf::from("/nowhere")];
        let told = in_each(&paths, |entered| entered.map_err(|error| error.kind()));
        assert_eq!(told, [Ok(()), Err(io::ErrorKind::NotFound)]);
    }
}
