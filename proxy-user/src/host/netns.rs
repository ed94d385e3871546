//! The network namespaces of this machine's processes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;

use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};

/// The network namespace of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// Network namespaces, as far as they are visible.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// The namespaces besides the caller's own, by inode. An open file keeps its namespace, also after the process by which it was found has
    /// ended.
    others: BTreeMap<u64, File>,
    /// The number of processes that this one may not inspect (`ptrace(2)`, "access mode checking"): they may be in
    /// other namespaces.
    pub hidden: usize,
    /// The first reason why a namespace could not be opened.
    pub unopened: Option<io::Error>,
}

impl Namespaces {
    /// Adds a namespace, unless it is known.
    fn add(&mut self, inode: u64, open: impl FnOnce() -> io::Result<File>) {
        let Entry::Vacant(place) = self.others.entry(inode) else { return };
        match open() {
            Ok(file) => drop(place.insert(file)),
            // The process has ended in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.unopened = self.unopened.take().or(Some(error)),
        }
    }
}

/// Whether this process may find and enter other network namespaces (`/proc/PID/ns`, `setns(2)`).
pub fn may_enter() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// Returns every network namespace that a process is in.
///
/// Namespaces of processes that are not in this `/proc` (in a container without the host's processes) are missing, and
/// so are namespaces without a process.
pub fn all() -> io::Result<Namespaces> {
    let own = Path::new(OWN).metadata()?.ino();
    let mut namespaces = Namespaces::default();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            let path = entry.path().join("ns/net");
            match path.metadata() {
                Ok(metadata) if metadata.ino() == own => {}
                Ok(metadata) => namespaces.add(metadata.ino(), || File::open(path)),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    // The first process is the machine's own, and may be protected.
                    namespaces.hidden += usize::from(name != "1");
                }
                // The process has ended in the meantime.
                Err(_) => {}
            }
        }
    }
    Ok(namespaces)
}

/// Runs `work` in the caller's own namespace, which needs no permission, and in each of the others, on a separate thread that ends
/// afterwards. `work` gets the result of entering the namespace; once, if there can be no thread now. A namespace whose last
/// process has ended is skipped.
pub fn in_each<T: Send>(namespaces: &Namespaces, mut work: impl FnMut(io::Result<()>) -> T + Send) -> Vec<T> {
    let run = || {
        let own = work(Ok(()));
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let entered =
            namespaces.others.values().map(enter).filter(|entered| !entered.as_ref().is_err_and(is_gone));
        [own].into_iter().chain(entered.map(&mut work)).collect()
    };
    let done = thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, run)?;
        // A panic of `work` has been reported already.
        Ok(thread.join().unwrap_or_default())
    });
    done.unwrap_or_else(|error| vec![work(Err(error))])
}

fn enter(file: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_other_namespace_is_there_once() {
        let own = Path::new("/proc/self/ns/net").metadata().unwrap().ino();
        let found = all().unwrap();
        let mut inodes: Vec<_> = found.others.values().map(|file| file.metadata().unwrap().ino()).collect();
        let count = inodes.len();
        inodes.sort_unstable();
        inodes.dedup();
        assert!(inodes.len() == count && !inodes.contains(&own));
    }

    #[test]
    fn visitor_gets_the_result_of_entering_the_namespace() {
        let mut namespaces = Namespaces::default();
        namespaces.add(1, || File::open("/proc/self/stat"));
        let results = in_each(&namespaces, |entered| entered.map_err(|error| error.kind()));
        assert_eq!(results, [Ok(()), Err(io::ErrorKind::InvalidInput)]);
    }

    #[test]
    fn unopened_namespace_of_a_running_process_is_an_error() {
        let mut namespaces = Namespaces::default();
        namespaces.add(1, || File::open("/proc/self/stat"));
        namespaces.add(1, || Err(io::Error::from_raw_os_error(libc::EIO)));
        namespaces.add(2, || Err(io::ErrorKind::NotFound.into()));
        assert!(namespaces.unopened.is_none() && namespaces.others.len() == 1, "{namespaces:?}");
        namespaces.add(3, || Err(io::Error::from_raw_os_error(libc::EMFILE)));
        namespaces.add(4, || Err(io::Error::from_raw_os_error(libc::EIO)));
        assert_eq!(namespaces.unopened.and_then(|error| error.raw_os_error()), Some(libc::EMFILE));
    }
}
