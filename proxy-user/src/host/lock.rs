//! Locks between processes, which may be in different containers, on files that only root can open: a process that can open a
//! file can lock it. For other objects: [`super::netfilter::lock`].

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags};

/// The lock of a directory or file, held until this is dropped.
#[derive(Debug)]
pub struct Lock(OwnedFd);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a child between fork and exec has the descriptor too. If this fails, the close that follows
        // releases the lock.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the lock of a directory or file; `None` if another process has it.
///
/// The lock is on the object itself that must not be shared, so it works across the containers that see the object, and ends
/// with the process, even if the process is killed.
pub fn lock(path: &Path) -> io::Result<Option<Lock>> {
    let fd = open(path)?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(Lock(fd))),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Takes a lock that other processes may have at the same time; waits while one has the lock of [`lock`].
pub fn share(path: &Path) -> io::Result<Lock> {
    let fd = open(path)?;
    rustix::fs::flock(&fd, FlockOperation::LockShared)?;
    Ok(Lock(fd))
}

/// Whether another process has a lock of the directory or file; false if there is none.
pub fn is_held(path: &Path) -> bool {
    matches!(lock(path), Ok(None))
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_lock_is_seen_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_held(folder.path()));
        let held = [share(folder.path()).unwrap(), share(folder.path()).unwrap()];
        assert!(is_held(folder.path()));
        assert!(lock(folder.path()).unwrap().is_none());
        drop(held);
        assert!(!is_held(folder.path()));
        assert!(!is_held(&folder.path().join("nothing")));
    }

    #[test]
    fn a_lock_ends_when_dropped_also_while_a_child_has_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap().unwrap();
        let of_a_child = held.0.try_clone().unwrap();
        assert!(lock(dir.path()).unwrap().is_none());
        drop(held);
        assert!(lock(dir.path()).unwrap().is_some());
        drop(of_a_child);
    }
}
