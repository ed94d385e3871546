//! What connections tell of backends (`health`), and how selection goes by it; see [`proxy_common::health`].

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

/// The number of the client whose segment begins a connection; [`NO_CLIENT`]: nothing is to be skipped. In the middle of a
/// connection nothing is, since the backend was selected once.
#[inline(always)]
pub fn client_of<A: Address>(service: &ServiceEntry, address: &A, tcp_flags: u16) -> u32 {
    if service.flags & SERVICE_EJECTS != 0 && is_syn(tcp_flags) { client(address) } else { NO_CLIENT }
}

/// Whether a backend takes a new connection of a client: [`TAKES`], or how bad it is to select it nevertheless.
#[inline(always)]
pub fn rank<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    match maps.health(id) {
        // Nearly always.
        Some(word) if is_plain(word.load()) => TAKES,
        Some(_) => maps.weigh(id, client, random),
        None => TAKES,
    }
}

/// [`rank`] of a backend that has failed, or joined.
#[inline(always)]
pub fn weigh<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return TAKES };
    let (found, hz) = (word.load(), time.config.hz);
    let word_now = current(found, time.now, hz);
    if word_now != found {
        // If another CPU was faster, its word counts.
        word.compare_exchange(found, word_now);
    }
    let standing = standing(word_now, client, time.now, hz);
    if taken(standing, random) { TAKES } else { standing as u32 }
}

/// Whether a backend is skipped by a client, whatever chance says of a trial.
#[inline(always)]
pub fn is_ejected<M: Health>(maps: M, id: u32, client: u32) -> bool {
    // With this number, chance does not take it.
    const NEVER: u32 = 0;
    rank(maps, id, client, NEVER) == Standing::Ejected as u32
}

/// The backend has answered.
#[inline(always)]
pub fn answered<M: Health>(maps: M, id: u32) {
    if let Some(word) = maps.health(id)
        && word.load() != HEALTH_ANSWERED
    {
        word.store(HEALTH_ANSWERED);
    }
}

/// A connection of the client has failed. Not 0: that ejects the backend.
#[inline(always)]
pub fn failed<M: Health>(maps: M, id: u32, client: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return 0 };
    let found = word.load();
    let (next, ejects) =
        after_failure(current(found, time.now, time.config.hz), client, time.now, time.config.hz);
    // If another CPU was faster, its word counts: a failure more or less.
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
