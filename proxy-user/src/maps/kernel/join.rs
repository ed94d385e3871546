//! `health`, where an id begins.

use std::io;
use std::sync::atomic::{Ordering, fence};

use proxy_common::health::{HEALTH_ANSWERED, HEALTH_NEWCOMER};

use super::super::Write;
use super::super::mapping::Mapping;
use super::super::sys::Stopped;

/// Forgets what was told of ids. What programs write meanwhile is of the id's last owner, or comes again.
pub(super) fn join(health: &Mapping, run: &[Write]) -> Result<(), Stopped> {
    let word = |id: u32| health.word64(id as usize);
    let has_answered =
        |id: &u32| word(*id).is_some_and(|word| word.load(Ordering::Relaxed) & HEALTH_ANSWERED != 0);
    for (done, write) in run.iter().enumerate() {
        let Write::Join(id, _, others) = write else { continue };
        let outside = || Stopped { done, source: io::Error::from_raw_os_error(libc::E2BIG) };
        let newcomer = if others.iter().any(has_answered) { HEALTH_NEWCOMER } else { 0 };
        word(*id).ok_or_else(outside)?.store(newcomer, Ordering::Relaxed);
    }
    // What refers to these ids is written after this.
    fence(Ordering::SeqCst);
    Ok(())
}
