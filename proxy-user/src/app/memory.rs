//! Returns memory to the kernel when it is no longer needed.
//!
//! The start needs several times the memory that is used later: lists of objects, the BPF object, plans that become map
//! entries. The allocator keeps freed memory for the next allocation, which may be weeks later. Most of the program's
//! code and constants are used only at the start.

use std::io;
use std::ops::Range;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::driver::Status;
use crate::programs;

/// The pause after the first sync, until the work after it (attaching programs, checking sockets) is done too.
const AFTER_FIRST_SYNC: Duration = Duration::from_secs(3);
/// How often memory is returned again: every later list leaves as much freed memory behind as the first one.
const PERIOD: Duration = Duration::from_mins(1);

/// Configures the C library's allocator; must be called before there is a second thread.
#[cfg(target_env = "gnu")]
pub fn set_up() {
    /// One arena for each worker; more arenas only scatter the freed memory.
    const ARENAS: libc::c_int = 2;
    /// Blocks of at least this size are mapped separately, and are unmapped when they are freed.
    const LARGE: libc::c_int = 256 * 1024;
    for (setting, value) in [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE)] {
        // SAFETY: the arguments are two numbers; the library ignores a setting that it does not know.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Does nothing for other allocators.
#[cfg(not(target_env = "gnu"))]
pub fn set_up() {}

/// Returns free memory to the kernel after the first sync, and then periodically.
pub async fn give_back(mut status: watch::Receiver<Status>) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    drop(status);
    sleep(AFTER_FIRST_SYNC).await;
    if let Ok(Err(error)) = spawn_blocking(release_program).await {
        tracing::debug!(%error, "cannot release the memory pages that only startup needed");
    }
    while spawn_blocking(now).await.is_ok() {
        sleep(PERIOD).await;
    }
}

/// Lets the kernel reclaim the pages of this program and its libraries. Pages that are needed again are mapped again.
fn release_program() -> io::Result<()> {
    for range in unchanged(&std::fs::read_to_string("/proc/self/smaps")?) {
        let start = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: the mapping is not writable, and none of its pages differs from the file, so the same bytes are read again.
        unsafe { rustix::mm::madvise(start, range.len(), rustix::mm::Advice::LinuxDontNeed) }?;
    }
    Ok(())
}

/// Returns the read-only mappings of files whose pages all have the contents of the file. Mappings with relocated
/// addresses of the program are not among them (`proc_pid_smaps(5)`).
fn unchanged(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).ok());
            let is_file = line.contains(" /") && matches!(second, "r--p" | "r-xp");
            candidate = start.zip(end).filter(|_| is_file).map(|(start, end)| start..end);
        } else if first == "Anonymous:" {
            found.extend(candidate.take().filter(|_| second == "0"));
        }
    }
    found
}

fn now() {
    programs::release_object();
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_as_in_its_file_is_released() {
        let smaps = "\
            55d0c0000000-55d0c0010000 r--p 00000000 fe:01 1  /usr/bin/ballast\nRss: 64 kB\nAnonymous:  0 kB\n\
            55d0c0010000-55d0c0030000 r-xp 00010000 fe:01 1  /usr/bin/ballast\nAnonymous:  0 kB\n\
            55d0c0030000-55d0c0040000 r--p 00030000 fe:01 1  /usr/bin/ballast\nAnonymous: 64 kB\n\
            55d0c0040000-55d0c0050000 rw-p 00040000 fe:01 1  /usr/bin/ballast\nAnonymous:  0 kB\n\
            7f0000000000-7f0000001000 rw-s 00000000 fe:01 1  anon_inode:bpf-map\nAnonymous:  0 kB\n\
            7f0000002000-7f0000003000 r-xp 00000000 00:00 0  [vdso]\nAnonymous:  0 kB\n";
        let expected = [0x55d0_c000_0000..0x55d0_c001_0000, 0x55d0_c001_0000..0x55d0_c003_0000];
        assert_eq!(unchanged(smaps), expected);
    }

    #[test]
    fn a_program_goes_on_without_its_pages() {
        let before = unchanged(&std::fs::read_to_string("/proc/self/smaps").unwrap());
        assert!(!before.is_empty());
        release_program().unwrap();
        assert_eq!(unchanged(&std::fs::read_to_string("/proc/self/smaps").unwrap()), before);
    }
}
