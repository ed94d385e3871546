//! The health of backends (`health`), as their connections have shown it, and its use in the selection; see
//! [`proxy_common::health`].

use proxy_common::Address;
use proxy_common::health::{
    HEALTH_ANSWERED, NO_CLIENT, Standing, after_failure, client, current, is_plain, standing, taken,
};
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};

use crate::env::Health;
use crate::flow::track::is_syn;
use crate::shared::{Exchange as _, Shared as _};

/// [`rank`] of a backend that takes the connection.
pub const TAKES: u32 = Standing::Good as u32;

/// Returns the number of the client, if its packet opens a connection; [`NO_CLIENT`]: no backend is skipped. In the middle of
/// a connection none is skipped, since the backend was selected before.
#[inline(always)]
pub fn client_of<A: Address>(service: &ServiceEntry, address: &A, tcp_flags: u16) -> u32 {
    if service.flags & SERVICE_EJECTS != 0 && is_syn(tcp_flags) { client(address) } else { NO_CLIENT }
}

/// Returns [`TAKES`] if a backend takes a new connection of a client; else a number that is higher for a worse backend.
#[inline(always)]
pub fn rank<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    match maps.health(id) {
        // The usual case.
        Some(word) if is_plain(word.load()) => TAKES,
        Some(_) => maps.rank_slow(id, client, random),
        None => TAKES,
    }
}

/// Returns the [`rank`] of a backend that has failed, or that has joined a Service recently.
#[inline(always)]
pub fn rank_slow<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return TAKES };
    let (found, hz) = (word.load(), time.config.hz);
    let word_now = current(found, time.now, hz);
    if word_now != found {
        // If another CPU has written the word first, its value stays.
        word.compare_exchange(found, word_now);
    }
    let standing = standing(word_now, client, time.now, hz);
    if taken(standing, random) { TAKES } else { standing as u32 }
}

/// Whether a backend is ejected for a client. A backend on trial is not ejected.
#[inline(always)]
pub fn is_ejected<M: Health>(maps: M, id: u32, client: u32) -> bool {
    // A random number with which a trial is never accepted.
    const NEVER: u32 = 0;
    rank(maps, id, client, NEVER) == Standing::Ejected as u32
}

/// Notes that the backend has answered.
#[inline(always)]
pub fn answered<M: Health>(maps: M, id: u32) {
    if let Some(word) = maps.health(id)
        && word.load() != HEALTH_ANSWERED
    {
        word.store(HEALTH_ANSWERED);
    }
}

/// Notes a failed connection of the client. Returns not 0 if this ejects the backend.
#[inline(always)]
pub fn note_failure<M: Health>(maps: M, id: u32, client: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return 0 };
    let found = word.load();
    let (next, ejects) =
        after_failure(current(found, time.now, time.config.hz), client, time.now, time.config.hz);
    // If another CPU has written the word first, its value stays: one failure more or less does not matter.
    u32::from(next != found && word.compare_exchange(found, next) == found && ejects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_does_not_take_a_trial_where_only_ejections_count() {
        assert!(!taken(Standing::Trial, 0));
    }
}
