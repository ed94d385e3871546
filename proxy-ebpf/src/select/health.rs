//! The health of backends (`health`, `skips`), as their connections have shown it, and its use in the selection; see
//! [`proxy_common::health`].

use proxy_common::Address;
use proxy_common::health::{
    ANSWERED_ONLY, Failure, HEALTH_SKIPPED, IGNORES_SILENCE, NO_CLIENT, Standing, after_answer,
    after_failure, after_reach, after_refusal, after_success, age, client, current, has_answered, is_plain,
    skip_slot, skipped_for, standing, taken, with_skip,
};
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};

use crate::env::Health;
use crate::flow::track::is_syn;
use crate::shared::{Exchange as _, Shared as _};

/// [`rank`] of a backend that takes the connection.
pub const TAKES: u32 = Standing::Good as u32;

/// Returns the number of the client, if its packet opens a connection; [`NO_CLIENT`]: no backend is skipped. In the middle of
/// a connection none is skipped, since the backend was selected before. `seed`: that of the configuration.
#[inline(always)]
pub fn client_of<A: Address>(service: &ServiceEntry, address: &A, tcp_flags: u16, seed: u32) -> u32 {
    if service.flags & SERVICE_EJECTS != 0 && is_syn(tcp_flags) { client(address, seed) } else { NO_CLIENT }
}

/// Lowest [`rank`] of a backend that has not answered lately, in a selection with [`ANSWERED_ONLY`].
const UNKNOWN: u32 = 1 << 30;

/// Returns [`TAKES`] if a backend takes a new connection of a client; else a number that is higher for a worse backend.
/// `client`: its number, with [`ANSWERED_ONLY`] or [`IGNORES_SILENCE`]. With [`ANSWERED_ONLY`], the best backend is the one
/// that has answered last.
#[inline(always)]
pub fn rank<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    match maps.health(id) {
        // The usual case.
        Some(word) if is_plain(word.load()) && client & ANSWERED_ONLY == 0 => TAKES,
        Some(_) => maps.rank_slow(id, client, random),
        None => TAKES,
    }
}

/// Returns the [`rank`] of a backend that has failed, or that has joined a Service recently, or that has to have answered.
#[inline(always)]
pub fn rank_slow<M: Health>(maps: M, id: u32, client: u32, random: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return TAKES };
    let (found, hz) = (word.load(), time.config.hz);
    let word_now = current(found, time.now, hz);
    if word_now != found {
        // If another CPU has written the word first, its value stays.
        word.compare_exchange(found, word_now);
    }
    let unknown = if client & ANSWERED_ONLY != 0 { UNKNOWN } else { 0 };
    let (index, tag) = skip_slot(client, id);
    if word_now & HEALTH_SKIPPED != 0
        && let Some(skip) = maps.skip(index)
        && skipped_for(skip.load(), tag, word_now, client, time.now, hz) != 0
    {
        return unknown + Standing::Ejected as u32;
    }
    if unknown != 0 && has_answered(word_now, time.now, hz) {
        return 1 + age(word_now, time.now, hz);
    }
    let standing = standing(word_now, time.now, hz);
    if unknown == 0 && taken(standing, random) { TAKES } else { unknown + standing as u32 }
}

/// Whether a backend is ejected, or has refused a connection of the client lately. Silence is no refusal.
#[inline(always)]
pub fn refuses<M: Health>(maps: M, id: u32, client: u32) -> bool {
    // A random number with which a trial is never accepted.
    const NEVER: u32 = 0;
    rank(maps, id, client | IGNORES_SILENCE, NEVER) == Standing::Ejected as u32
}

/// Whether a backend has answered a connection lately, has not refused one since, and is not skipped by the client.
#[inline(always)]
pub fn works<M: Health>(maps: M, id: u32, client: u32) -> bool {
    rank(maps, id, client | ANSWERED_ONLY, 0) < UNKNOWN
}

/// Notes that the backend has answered a connection of the client with this address.
#[inline(always)]
pub fn note_answer<M: Health, A: Address>(maps: M, id: u32, address: impl FnOnce() -> A) {
    let is_skipped = maps.health(id).is_some_and(|word| word.load() & HEALTH_SKIPPED != 0);
    let number = match maps.config() {
        // The hash of the address takes time.
        Some(config) if is_skipped => client(&address(), config.flow_seed),
        _ => NO_CLIENT,
    };
    maps.answered(id, number);
}

/// Notes that the backend has answered a connection of the client with this number.
#[inline(always)]
pub fn answered<M: Health>(maps: M, id: u32, client: u32) {
    if let (Some(time), Some(word)) = (maps.time(), maps.health(id)) {
        let found = word.load();
        clear_failures(maps, id, client, found);
        let next = after_answer(found, time.now, time.config.hz);
        if next != found {
            // If another CPU has written the word first, the next answer is noted.
            word.compare_exchange(found, next);
        }
    }
}

/// Clears what failures of a client have shown, after an answer to the client. `word`: the backend's word of `health`.
#[inline(always)]
fn clear_failures<M: Health>(maps: M, id: u32, client: u32, word: u64) {
    let (index, tag) = skip_slot(client, id);
    if word & HEALTH_SKIPPED != 0
        && let (Some(time), Some(skip)) = (maps.time(), maps.skip(index))
    {
        let found = skip.load();
        let next = after_success(found, tag, time.now, time.config.hz);
        if next != found {
            skip.compare_exchange(found, next);
        }
    }
}

/// Notes that a socket of another network namespace than the node's, the client with this number, was answered.
#[inline(always)]
pub fn reached<M: Health>(maps: M, id: u32, client: u32) {
    if let Some(word) = maps.health(id) {
        let found = word.load();
        clear_failures(maps, id, client, found);
        let next = after_reach(found);
        if next != found {
            word.compare_exchange(found, next);
        }
    }
}

/// Notes a failed connection of the client; `failure`: the number of a [`Failure`]. Returns not 0 if this ejects the backend.
#[inline(always)]
pub fn note_failure<M: Health>(maps: M, id: u32, client: u32, failure: u32) -> u32 {
    let (Some(time), Some(word)) = (maps.time(), maps.health(id)) else { return 0 };
    let (now, hz, failure) = (time.now, time.config.hz, Failure::from_number(failure));
    let (index, tag) = skip_slot(client, id);
    if let Some(skip) = maps.skip(index) {
        // A race is lost by one of two failures, which are alike.
        skip.store(after_failure(skip.load(), tag, failure, now, hz));
    }
    let found = word.load();
    let word_now = current(found, now, hz);
    let is_refusal = matches!(failure, Failure::Refusal);
    let (next, ejects) =
        if is_refusal { after_refusal(word_now, client, now, hz) } else { (word_now, false) };
    let next = with_skip(next, now);
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
