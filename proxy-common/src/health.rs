//! `health` and `skips`: what connections have shown about each backend (passive ejection).
//!
//! Three questions have separate answers, each with its own evidence:
//!
//! 1. *Is the backend out of use for all clients?* Only if it has refused connections of two clients in a row with a RST
//!    ([`after_refusal`]).
//! 2. *Does one client skip the backend?* After any failure of its own connection ([`Failure`], [`after_failure`]). No other
//!    client is affected: a `NetworkPolicy`, a spoofed source or a lost packet concern one client only.
//! 3. *May a refusal be hidden from the client?* Once for a connection, if another backend has answered lately
//!    ([`has_answered`]).
//!
//! The result of a socket's connection counts for all clients only if the socket is the node's own. In another network namespace, a
//! sidecar to which netfilter redirects the connection may have answered it, or a netfilter rule may have refused it: such a
//! result counts for the sockets of this namespace only.
//!
//! An answer clears what refusals have shown. A backend that was ejected gets a small share of the connections until it answers
//! one. So does a backend that joins a Service whose other backends answer, after [`JOIN_SECS`] without any.

use crate::Address;
use crate::flow::mix;
use crate::select::next_random;

/// Low half of a word of `health`: jiffies of the last refusal that counts, of the last answer, or when a program first
/// examined a newcomer; valid only with [`HEALTH_SINCE`].
pub const HEALTH_TIME: u64 = 0xffff_ffff;
/// The client of the first refusal in a row: the lowest bits of its [`client`] number. 0: none.
pub const HEALTH_FIRST: u64 = 0xffff << FIRST_SHIFT;
/// How often the backend was ejected in a row before: each ejection lasts twice as long as the previous one.
pub const HEALTH_LEVEL: u64 = 0x7 << LEVEL_SHIFT;
/// Two clients in a row were refused: the backend is ejected.
pub const HEALTH_EJECTED: u64 = 1 << 51;
/// With [`HEALTH_SKIPPED`]: when a client last failed, in units of [`STAMP_UNIT`] jiffies, without the upper bits.
pub const HEALTH_STAMP: u64 = 0x7f << STAMP_SHIFT;
/// A socket of another network namespace than the node's was answered, perhaps inside that namespace. Only [`HEALTH_NEWCOMER`]
/// depends on it.
pub const HEALTH_REACHED: u64 = 1 << 59;
/// Clients may skip the backend: `skips` is looked up.
pub const HEALTH_SKIPPED: u64 = 1 << 60;
/// The backend joined a Service in which another backend has [`HEALTH_ANSWERED`] or [`HEALTH_REACHED`], and has neither itself
/// (a newcomer).
pub const HEALTH_NEWCOMER: u64 = 1 << 61;
/// The backend has answered, and has not refused a connection since.
pub const HEALTH_ANSWERED: u64 = 1 << 62;
/// [`HEALTH_TIME`] is valid.
pub const HEALTH_SINCE: u64 = 1 << 63;

const FIRST_SHIFT: u32 = 32;
const LEVEL_SHIFT: u32 = 48;
const STAMP_SHIFT: u32 = 52;
/// Jiffies in a unit of [`HEALTH_STAMP`].
pub const STAMP_UNIT: u32 = 1 << 10;

/// The highest level: an ejection lasts 32 seconds.
const MOST_LEVEL: u32 = 5;
/// The highest count of repetitions.
const MOST_REPEATS: u32 = 3;
/// A client skips the backend for 2, 8, 32 and at most 64 seconds: the first time is longer than a SYN's first backoff.
const MOST_DOUBLINGS: u32 = 6;
/// Maximum time for which a backend gets a small share, and for which repetitions are remembered, in seconds.
pub const TRIAL_SECS: u32 = 30;
/// The small share: one in this many of the connections that would select the backend. A power of two.
pub const TRIAL_SHARE: u32 = 8;
/// For this many seconds after its first lookup, a newcomer gets connections only if the other backends fail: a pod without a
/// readiness probe is ready before its process listens. A refusal ends this time, so that refusals of one client never extend
/// it for the others.
pub const JOIN_SECS: u32 = 2;
/// For this many seconds an answer shows that the backend works.
pub const ANSWER_SECS: u32 = 60;

/// Number of elements of `skips`, a power of two.
pub const SKIP_COUNT: u32 = 1 << 14;
/// Low half of a word of `skips`: jiffies of the last failure that counts.
pub const SKIP_TIME: u64 = 0xffff_ffff;
const SKIP_TAG: u64 = 0x3ff_ffff << TAG_SHIFT;
const SKIP_KIND: u64 = 0x3 << KIND_SHIFT;
const SKIP_REPEATS: u64 = 0x3 << REPEATS_SHIFT;
/// The word of `skips` is in use.
pub const SKIP_USED: u64 = 1 << 63;
const TAG_SHIFT: u32 = 32;
const KIND_SHIFT: u32 = 58;
const REPEATS_SHIFT: u32 = 60;

/// Client number of a connection that skips no backend.
pub const NO_CLIENT: u32 = 0;
/// Bits of a client number; the other bits are for flags of a selection.
const CLIENT: u32 = (1 << 30) - 1;
/// Flag of a selection, beside the client's number: the backend that has answered last takes the connection.
pub const ANSWERED_ONLY: u32 = 1 << 31;
/// Flag of a selection, beside the client's number: silence is no reason to skip a backend.
pub const IGNORES_SILENCE: u32 = 1 << 30;

/// How a connection has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The client has retransmitted its SYN.
    Silence = 0,
    /// An ICMP error "unreachable", which anyone may send.
    Unreachable = 1,
    /// A RST of the backend.
    Refusal = 2,
    /// A RST that a socket in another network namespace than the node's has got, perhaps from something in that namespace.
    RefusalInside = 3,
}

impl Failure {
    /// Returns the failure with this number.
    #[inline(always)]
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Silence,
            1 => Self::Unreachable,
            2 => Self::Refusal,
            _ => Self::RefusalInside,
        }
    }
}

/// Whether a new connection may use a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The backend gets its whole share.
    Good = 0,
    /// The backend gets a small share.
    Trial = 1,
    /// The backend has just joined: it is used only if the others fail.
    Joining = 2,
    /// The backend is used only if no other one is left.
    Ejected = 3,
}

/// Returns the number of a client: a hash with thirty bits, so that two clients hardly ever count as one. The lower half is
/// never 0.
#[inline(always)]
const fn number(hash: u64) -> u32 {
    let upper = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 34) as u32;
    if upper as u16 == 0 { upper | 1 } else { upper }
}

/// Returns the number of a client of the packet path. `seed` is secret, so that no attacker finds two addresses with the same
/// number.
#[inline(always)]
pub fn client<A: Address>(address: &A, seed: u32) -> u32 {
    let [a, b, c, d] = address.words();
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let mut hash = mix(pair(seed, !seed), pair(a, b));
    if size_of::<A>() > size_of::<u32>() {
        hash = mix(hash, pair(c, d));
    }
    number(hash)
}

/// As [`client`], for a socket: its client is the network namespace.
#[inline(always)]
pub fn socket_client(netns: u64, seed: u32) -> u32 {
    number(mix(u64::from(seed), netns))
}

#[inline(always)]
const fn first(word: u64) -> u32 {
    ((word & HEALTH_FIRST) >> FIRST_SHIFT) as u32
}

#[inline(always)]
const fn level(word: u64) -> u32 {
    ((word & HEALTH_LEVEL) >> LEVEL_SHIFT) as u32
}

/// Returns for how many jiffies an ejection lasts.
#[inline(always)]
const fn span(word: u64, hz: u32) -> u32 {
    hz << level(word)
}

/// Returns the jiffies since the time of a word; 0 if another CPU wrote the word a moment after `now` was read.
#[inline(always)]
pub const fn age(word: u64, now: u32, hz: u32) -> u32 {
    let age = now.wrapping_sub(word as u32);
    if age.wrapping_neg() <= hz { 0 } else { age }
}

#[inline(always)]
const fn stamp(now: u32) -> u64 {
    ((now / STAMP_UNIT) as u64 & 0x7f) << STAMP_SHIFT
}

/// Whether each client's connections may use the backend: nothing else of the word needs to be read.
#[inline(always)]
pub const fn is_plain(word: u64) -> bool {
    word & (HEALTH_FIRST | HEALTH_LEVEL | HEALTH_EJECTED | HEALTH_SKIPPED | HEALTH_NEWCOMER) == 0
}

/// Returns the word as of `now`: the time is set if no program has examined the newcomer before, and what is older than its
/// timeout is cleared.
#[inline(always)]
pub const fn current(word: u64, now: u32, hz: u32) -> u64 {
    let mut word = word;
    let units = (stamp(now) >> STAMP_SHIFT).wrapping_sub(word >> STAMP_SHIFT) as u32 & 0x7f;
    if units * STAMP_UNIT > (hz << MOST_DOUBLINGS) + hz * TRIAL_SECS + STAMP_UNIT {
        word &= !(HEALTH_SKIPPED | HEALTH_STAMP);
    }
    let skips = word & (HEALTH_SKIPPED | HEALTH_STAMP);
    if word & (HEALTH_FIRST | HEALTH_LEVEL | HEALTH_EJECTED | HEALTH_NEWCOMER) == 0 {
        word
    } else if word & HEALTH_SINCE == 0 {
        word | HEALTH_SINCE | now as u64
    } else if age(word, now, hz) >= span(word, hz) + hz * TRIAL_SECS {
        skips
    } else {
        word
    }
}

/// Returns the standing of a backend with all clients; `word` is a result of [`current`].
#[inline(always)]
pub const fn standing(word: u64, now: u32, hz: u32) -> Standing {
    let is_ejected = word & HEALTH_EJECTED != 0;
    if is_ejected && age(word, now, hz) < span(word, hz) {
        Standing::Ejected
    } else if word & (HEALTH_NEWCOMER | HEALTH_FIRST) == HEALTH_NEWCOMER
        && age(word, now, hz) < hz * JOIN_SECS
    {
        Standing::Joining
    } else if is_ejected || word & (HEALTH_LEVEL | HEALTH_NEWCOMER) != 0 {
        Standing::Trial
    } else {
        Standing::Good
    }
}

/// Whether a connection uses a backend with this standing; during a trial, `random` decides.
#[inline(always)]
pub const fn taken(standing: Standing, random: u32) -> bool {
    // The upper bits of a linear congruential generator are the random ones.
    let is_picked = next_random(random) >> 16 & (TRIAL_SHARE - 1) == 0;
    matches!(standing, Standing::Good) || matches!(standing, Standing::Trial) && is_picked
}

/// Whether the backend has answered a connection lately, and has not refused one since.
#[inline(always)]
pub const fn has_answered(word: u64, now: u32, hz: u32) -> bool {
    word & HEALTH_ANSWERED != 0 && age(word, now, hz) < hz * ANSWER_SECS
}

/// Returns the word after the backend has answered a connection. The time of an answer is written once a second, so that the
/// CPUs can share the word.
#[inline(always)]
pub const fn after_answer(word: u64, now: u32, hz: u32) -> u64 {
    let skips = word & (HEALTH_SKIPPED | HEALTH_STAMP);
    let only_answers =
        word & !(HEALTH_TIME | HEALTH_SKIPPED | HEALTH_STAMP) == HEALTH_ANSWERED | HEALTH_SINCE;
    if only_answers && age(word, now, hz) < hz {
        word
    } else {
        skips | HEALTH_ANSWERED | HEALTH_SINCE | now as u64
    }
}

/// Returns the word after a socket of another network namespace than the node's was answered: [`HEALTH_NEWCOMER`] is cleared. The
/// answer shows nothing else, since a sidecar in that namespace may have sent it.
#[inline(always)]
pub const fn after_reach(word: u64) -> u64 {
    word & !HEALTH_NEWCOMER | HEALTH_REACHED
}

/// Returns a word after a refusal at `now`, with the bits of `word` that a refusal keeps.
#[inline(always)]
const fn refused(word: u64, level: u32, first: u32, now: u32) -> u64 {
    let kept = word & (HEALTH_NEWCOMER | HEALTH_SKIPPED | HEALTH_STAMP) | HEALTH_SINCE | now as u64;
    kept | (level as u64) << LEVEL_SHIFT | (first as u64) << FIRST_SHIFT
}

/// Returns the word after the backend has refused a connection of the client, and whether that ejects the backend. `word`
/// is a result of [`current`].
///
/// One client counts once, however often it is refused.
#[inline(always)]
pub const fn after_refusal(word: u64, client: u32, now: u32, hz: u32) -> (u64, bool) {
    let (client, one, level) = (client & 0xffff, first(word), level(word));
    if word & HEALTH_EJECTED != 0 {
        if age(word, now, hz) < span(word, hz) {
            // The connection began before the ejection.
            return (word, false);
        }
        // The next ejection needs refusals of two clients again.
        let level = if level < MOST_LEVEL { level + 1 } else { level };
        return (refused(word, level, client, now), false);
    }
    let ejects = one != 0 && one != client;
    let first = if one == 0 { client } else { one };
    let next = refused(word, level, first, now);
    if ejects { (next | HEALTH_EJECTED, true) } else { (next, false) }
}

/// Returns the word after a client has failed: `skips` is looked up until its entries time out.
#[inline(always)]
pub const fn with_skip(word: u64, now: u32) -> u64 {
    word & !HEALTH_STAMP | HEALTH_SKIPPED | stamp(now)
}

/// Returns the index in `skips` of a client and a backend, and a word with the tag that is in their element. Flags of the
/// client number are ignored.
#[inline(always)]
pub fn skip_slot(client: u32, id: u32) -> (u32, u64) {
    let hash = mix(0, u64::from(client & CLIENT) | u64::from(id) << 32);
    (hash as u32 & (SKIP_COUNT - 1), hash >> 6 & SKIP_TAG | SKIP_USED)
}

/// Returns for how many jiffies the client of a word of `skips` skips the backend.
#[inline(always)]
const fn skip_span(skip: u64, hz: u32) -> u32 {
    let doublings = 1 + 2 * ((skip & SKIP_REPEATS) >> REPEATS_SHIFT) as u32;
    hz << if doublings < MOST_DOUBLINGS { doublings } else { MOST_DOUBLINGS }
}

/// Returns for how many more jiffies the client skips the backend; 0: it does not. `word`: the backend's word of `health`;
/// `skip`: the word of `skips` at the index of both, and `tag` the tag.
///
/// A refusal is no reason any more once the backend has answered any client later: then it refuses no one. Silence and ICMP errors
/// may concern this client only.
#[inline(always)]
pub const fn skipped_for(skip: u64, tag: u64, word: u64, client: u32, now: u32, hz: u32) -> u32 {
    let kind = (skip & SKIP_KIND) >> KIND_SHIFT;
    let is_void = skip & (SKIP_TAG | SKIP_USED) != tag
        || kind >= Failure::Refusal as u64
            && word & HEALTH_ANSWERED != 0
            && age(word, now, hz) <= age(skip, now, hz)
        || kind == Failure::Silence as u64 && client & IGNORES_SILENCE != 0;
    let (age, span) = (age(skip, now, hz), skip_span(skip, hz));
    if is_void || age >= span { 0 } else { span - age }
}

/// Returns the word of `skips` after a connection of the client has failed. If the client's next connection fails too, it
/// skips the backend for four times as long.
#[inline(always)]
pub const fn after_failure(skip: u64, tag: u64, failure: Failure, now: u32, hz: u32) -> u64 {
    let (age, span) = (age(skip, now, hz), skip_span(skip, hz));
    let new = tag | now as u64 | (failure as u64) << KIND_SHIFT;
    if skip & (SKIP_TAG | SKIP_USED) != tag || age >= span + hz * TRIAL_SECS {
        return new;
    }
    let repeats = ((skip & SKIP_REPEATS) >> REPEATS_SHIFT) as u32;
    if age < span {
        // The connection began before the first failure. The stronger reason stays.
        let is_stronger = failure as u64 > (skip & SKIP_KIND) >> KIND_SHIFT;
        return if is_stronger { new | (repeats as u64) << REPEATS_SHIFT } else { skip };
    }
    let repeats = if repeats < MOST_REPEATS { repeats + 1 } else { repeats };
    new | (repeats as u64) << REPEATS_SHIFT
}

/// Returns the word of `skips` after the backend has answered a connection of a client: what fails later is the first failure
/// again. The answer to a connection that began before a failure changes nothing.
#[inline(always)]
pub const fn after_success(skip: u64, tag: u64, now: u32, hz: u32) -> u64 {
    let is_over = age(skip, now, hz) >= skip_span(skip, hz);
    if skip & (SKIP_TAG | SKIP_USED) == tag && is_over { 0 } else { skip }
}

/// Returns for how many more jiffies the backend is ejected, for display; `None` if it is not.
pub const fn ejected_for(word: u64, now: u32, hz: u32) -> Option<u32> {
    let word = current(word, now, hz);
    let left = span(word, hz).saturating_sub(age(word, now, hz));
    if word & HEALTH_EJECTED != 0 && left != 0 { Some(left) } else { None }
}

#[cfg(test)]
mod tests;
