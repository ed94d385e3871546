//! Memory goes back to the kernel when it is not needed any more.
//!
//! The start takes several times what stays: lists of objects, the BPF object, plans that become rows of maps. The
//! allocator keeps freed memory for the next time, which may be weeks away.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::programs;
use crate::sync::Status;

/// After the first sync, until what follows it (programs are attached, sockets are looked through) is over too.
const SETTLE: Duration = Duration::from_secs(3);
/// How often it is looked at again: a list that was needed again leaves as much behind as the first one.
const PERIOD: Duration = Duration::from_mins(1);

/// Settings of the C library's allocator; to be made before there is a second thread.
#[cfg(target_env = "gnu")]
pub fn set_up() {
    /// One for each worker; more only scatter what is freed.
    const ARENAS: libc::c_int = 2;
    /// Blocks of this size have pages of their own, which go back when they are freed.
    const LARGE: libc::c_int = 256 * 1024;
    for (setting, value) in [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE)] {
        // SAFETY: two numbers; a setting that the library does not know changes nothing.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Other allocators are left as they are.
#[cfg(not(target_env = "gnu"))]
pub fn set_up() {}

/// Gives back what is free after the first sync, and now and then.
pub async fn give_back(mut status: watch::Receiver<Status>) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    drop(status);
    sleep(SETTLE).await;
    while spawn_blocking(now).await.is_ok() {
        sleep(PERIOD).await;
    }
}

fn now() {
    programs::release_object();
    #[cfg(target_env = "gnu")]
    // SAFETY: it touches only memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}
