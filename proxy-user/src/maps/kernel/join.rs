//! `health`: the first value of an id.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use proxy_common::health::{HEALTH_ANSWERED, HEALTH_NEWCOMER, HEALTH_REACHED};

use super::super::sys::Stopped;
use super::super::windows::{Array, Windows};
use proxy_core::store::Write;

/// Resets the health of ids. What programs write meanwhile concerns the id's previous owner, or is written again later.
pub(super) fn join(health: &Array, run: &[Write]) -> Result<(), Stopped> {
    let mut windows = health.windows();
    // Endpoints that join one port refer to the same list of its other endpoints, which may be long.
    let mut known = None;
    for (done, write) in run.iter().enumerate() {
        let Write::ResetHealth(id, _, others) = write else { continue };
        set(&mut windows, *id, others, &mut known).map_err(|source| Stopped { done, source })?;
    }
    // Entries that refer to these ids are written later.
    fence(Ordering::SeqCst);
    Ok(())
}

fn set<'a>(
    health: &mut Windows<'_>,
    id: u32,
    others: &'a Arc<[u32]>,
    known: &mut Option<(&'a Arc<[u32]>, u64)>,
) -> io::Result<()> {
    let first = match known {
        Some((list, first)) if Arc::ptr_eq(list, others) => *first,
        _ => first_value(health, others)?,
    };
    *known = Some((others, first));
    word(health, id)?.store(first, Ordering::Relaxed);
    Ok(())
}

/// Returns the first value of an endpoint that joins these others: on trial, if one of them has answered.
fn first_value(health: &mut Windows<'_>, others: &[u32]) -> io::Result<u64> {
    for other in others {
        if word(health, *other)?.load(Ordering::Relaxed) & (HEALTH_ANSWERED | HEALTH_REACHED) != 0 {
            return Ok(HEALTH_NEWCOMER);
        }
    }
    Ok(0)
}

fn word<'a>(health: &'a mut Windows<'_>, id: u32) -> io::Result<&'a AtomicU64> {
    let at = id as usize;
    let window = health.at(at..at + 1)?;
    window.word64(at).ok_or_else(|| io::Error::from_raw_os_error(libc::E2BIG))
}
