//! A test program that loads the programs apart from the machine's network and maps.

use std::path::{Path, PathBuf};

/// Gives this process a network of its own, and a bpffs that is gone when it ends. Call it before any thread.
pub fn isolate() -> PathBuf {
    // SAFETY: no other thread is there yet that could mind.
    let result = unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) };
    assert_eq!(result, 0, "needs root: {}", std::io::Error::last_os_error());
    let private = rustix::mount::MountPropagationFlags::REC | rustix::mount::MountPropagationFlags::PRIVATE;
    rustix::mount::mount_change("/", private).unwrap();
    let dir = Path::new("/sys/fs/bpf");
    rustix::mount::mount("bpf", dir, "bpf", rustix::mount::MountFlags::empty(), None).unwrap();
    dir.to_owned()
}
