//! `health`: the first value of an id.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use proxy_common::health::{HEALTH_ANSWERED, HEALTH_NEWCOMER, HEALTH_REACHED};

use super::super::sys::Stopped;
use super::super::windows::{Array, Windows};
use proxy_core::store::Write;

/// Resets the health of ids. What programs write meanwhile concerns the id's previous owner, or is written again later.
pub(super) fn join(health: &Array, run: &[Write]) -> Result<(), Stopped> {
    let mut windows = health.windows();
    for (done, write) in run.iter().enumerate() {
        let Write::ResetHealth(id, _, others) = write else { continue };
        one(&mut windows, *id, others).map_err(|source| Stopped { done, source })?;
    }
    // Entries that refer to these ids are written later.
    fence(Ordering::SeqCst);
    Ok(())
}

fn one(health: &mut Windows<'_>, id: u32, others: &[u32]) -> io::Result<()> {
    let mut newcomer = 0;
    for other in others {
        if word(health, *other)?.load(Ordering::Relaxed) & (HEALTH_ANSWERED | HEALTH_REACHED) != 0 {
            newcomer = HEALTH_NEWCOMER;
            break;
        }
    }
    word(health, id)?.store(newcomer, Ordering::Relaxed);
    Ok(())
}

fn word<'a>(health: &'a mut Windows<'_>, id: u32) -> io::Result<&'a AtomicU64> {
    let at = id as usize;
    let window = health.at(at..at + 1)?;
    window.word64(at).ok_or_else(|| io::Error::from_raw_os_error(libc::E2BIG))
}
