//! Isolates a test program that loads the BPF programs from the machine's network and maps.

use std::path::{Path, PathBuf};

/// Moves this process to a network and mount namespace of its own, and mounts a bpffs there, which disappears when the process
/// ends. Returns the path of the bpffs. Must be called before any thread is started.
pub fn isolate() -> PathBuf {
    // SAFETY: no other thread exists yet.
    let result = unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) };
    assert_eq!(result, 0, "needs root: {}", std::io::Error::last_os_error());
    let private = rustix::mount::MountPropagationFlags::REC | rustix::mount::MountPropagationFlags::PRIVATE;
    rustix::mount::mount_change("/", private).unwrap();
    let dir = Path::new("/sys/fs/bpf");
    rustix::mount::mount("bpf", dir, "bpf", rustix::mount::MountFlags::empty(), None).unwrap();
    dir.to_owned()
}
