//! Grows the flow tables while packets pass.
//!
//! A table begins with few entries. Further entries are segments behind the others (`maps::segments`): no flow moves, and the
//! programs use them as soon as `config` has their number. The index then gets more buckets, in steps of which each is
//! compatible with the programs of the step before (`FlowSize` in `proxy_common::config`): first every program looks in the
//! buckets by both numbers, then keys are added by the new number, then this module moves the other keys ([`keys`]). Between
//! two steps it waits until no program runs that has read the number of before. A growth that ends in the middle, as the agent
//! was killed, is continued by the next agent.

mod keys;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use aya::maps::MapData;
use proxy_common::Address;
use proxy_common::config::{FlowSize, NodeConfig};
use proxy_common::conntrack::is_expired;
use proxy_common::flow::{FlowEntry, MAX_FLOWS, STATE_USED, bits_of, buckets_for};
use proxy_common::map_names as names;
use rustix::mm::ProtFlags;

use self::keys::Keys;
use super::mapping::Mapping;
use super::segments::Segments;
use super::{settings, sys, view};

/// After a growth, at most one entry in this many is in use.
const ROOM: u32 = 4;
/// Passes over the entries after which keys that packets keep changing are left in their old buckets until the next look.
const PASSES: u32 = 64;

/// The pause after a growth that has failed; it doubles with each further failure.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest such pause: each attempt counts all entries.
const LAST_RETRY: Duration = Duration::from_mins(1);

/// What a look has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    /// 4 or 6.
    pub family: u8,
    /// Number of entries now.
    pub entries: u32,
    /// Number of keys that moved to other buckets.
    pub moved: usize,
}

/// The flow tables of both families.
pub struct FlowGrowth {
    config: OwnedFd,
    clock_hand: OwnedFd,
    syn_times: Option<Segments>,
    v4: Table,
    v6: Table,
}

/// The flow table of one family.
struct Table {
    index: usize,
    flows: Segments,
    buckets: Segments,
    /// Position of the clock hand when the entries were last counted.
    counted_at: Option<u64>,
    failure: Option<Failure>,
    /// Number of failures that [`FlowGrowth::take_failures`] has not returned.
    failures: u64,
}

/// A growth that has failed.
struct Failure {
    error: io::Error,
    /// When it is tried again.
    retry: Instant,
    pause: Duration,
}

impl FlowGrowth {
    /// Opens the maps that are pinned in `folder`.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let fd = |name: &str| {
            let map = MapData::from_pin(folder.join(name)).map_err(io::Error::other)?;
            map.fd().as_fd().try_clone_to_owned()
        };
        let table = |index, flows, buckets| {
            Ok::<_, io::Error>(Table {
                index,
                flows: Segments::open(folder, flows)?,
                buckets: Segments::open(folder, buckets)?,
                counted_at: None,
                failure: None,
                failures: 0,
            })
        };
        let latency = MapData::from_pin(folder.join(names::CONNECT_LATENCY)).and_then(|map| map.info());
        let is_measured = latency.is_ok_and(|info| info.max_entries() > 1);
        Ok(Self {
            config: fd(names::CONFIG)?,
            clock_hand: fd(names::CLOCK_HAND)?,
            syn_times: is_measured.then(|| Segments::open(folder, names::SYN_TIMES)).transpose()?,
            v4: table(0, names::FLOWS, names::FLOW_INDEX)?,
            v6: table(1, names::FLOWS6, names::FLOW_INDEX6)?,
        })
    }

    /// Lets those tables grow of which too much is in use, and continues a growth that did not end. A growth that fails is tried
    /// again after a pause: [`FlowGrowth::problems`]. An error: the maps cannot be read.
    pub fn grow(&mut self) -> io::Result<Vec<Grown>> {
        let (hands, _) = sys::lookup::<u32, u64>(self.clock_hand.as_fd(), None, 2)?;
        let config = settings::read(self.config.as_fd())?;
        let hand = |index: usize| hands.get(index).map_or(0, |(_, hand)| *hand);
        let Self { config: fd, syn_times, v4, v6, .. } = self;
        // Without memory for one family, the other one may still have room.
        let of_v4 = v4.tend(|table| table.grow::<[u8; 4]>(fd, syn_times.as_ref(), &config, hand(0)));
        let of_v6 = v6.tend(|table| table.grow::<[u8; 16]>(fd, syn_times.as_ref(), &config, hand(1)));
        Ok(of_v4.into_iter().chain(of_v6).collect())
    }

    /// Returns how often a table could not grow since the last call.
    pub fn take_failures(&mut self) -> u64 {
        std::mem::take(&mut self.v4.failures) + std::mem::take(&mut self.v6.failures)
    }

    /// Says which tables cannot grow, and why.
    pub fn problems(&self) -> Vec<String> {
        let tables = [("IPv4", &self.v4), ("IPv6", &self.v6)];
        let failed = tables.into_iter().filter_map(|(family, table)| Some((family, table.failure.as_ref()?)));
        failed
            .map(|(family, Failure { error, .. })| format!("the {family} flow table cannot grow: {error}"))
            .collect()
    }
}

/// Returns the number of entries in use above which a table of this size grows: half of them, and a quarter of the first
/// table, which new flows fill before a busy machine runs this thread again.
const fn most_in_use(entries: u32) -> u32 {
    entries / if entries <= names::FIRST_FLOWS { 4 } else { 2 }
}

/// Returns the size to which a table of `entries` grows when `held` are in use: a power of two of at least twice the size, or the
/// limit, which is larger than `entries` and need not be a power of two. The first table grows to four times its size: while its
/// keys move, new flows of a busy machine would fill twice the size.
fn larger(entries: u32, held: u32, limit: u32) -> u32 {
    let wanted = held.saturating_mul(ROOM).checked_next_power_of_two().unwrap_or(limit);
    let least = if entries <= names::FIRST_FLOWS { ROOM } else { 2 };
    wanted.max(entries.saturating_mul(least)).min(limit)
}

impl Table {
    /// Runs `grow`, unless it has failed and the pause is not over.
    fn tend(&mut self, grow: impl FnOnce(&mut Self) -> io::Result<Option<Grown>>) -> Option<Grown> {
        let now = Instant::now();
        if self.failure.as_ref().is_some_and(|failure| now < failure.retry) {
            return None;
        }
        match grow(self) {
            Ok(grown) => {
                self.failure = None;
                grown
            }
            Err(error) => {
                let doubled = self.failure.as_ref().map_or(FIRST_RETRY, |failure| failure.pause * 2);
                let pause = doubled.min(LAST_RETRY);
                self.failure = Some(Failure { error, retry: now + pause, pause });
                self.failures += 1;
                self.counted_at = None;
                None
            }
        }
    }

    fn grow<A: Address>(
        &mut self,
        config_fd: &OwnedFd,
        syn_times: Option<&Segments>,
        config: &NodeConfig,
        hand: u64,
    ) -> io::Result<Option<Grown>> {
        let size = config.flows.get(self.index).copied().unwrap_or_default();
        let limit = if config.limits.flows == 0 { MAX_FLOWS } else { config.limits.flows.min(MAX_FLOWS) };
        let mut entries = size.entries;
        // New flows take entries where the hand is: as long as it has moved little, few entries can have come into use.
        let has_moved =
            self.counted_at.is_none_or(|before| hand.wrapping_sub(before) >= u64::from(entries / 8));
        if entries < limit && has_moved && hand > 0 {
            self.counted_at = Some(hand);
            let held = self.held::<A>(config, entries)?;
            if held > most_in_use(entries) {
                entries = larger(entries, held, limit);
            }
        }
        let buckets = buckets_for(entries).max(size.searched[0]);
        if entries == size.entries && size.searched[1] == 0 && size.buckets >= buckets {
            return Ok(None);
        }
        // The index first: with more entries than it has room for, new flows would be dropped instead of old ones.
        self.buckets.ensure(buckets as usize)?;
        if let Err(error) = self.flows.ensure(entries as usize) {
            // What there was memory for is used.
            let there = entries.min(self.flows.len() as u32);
            entries = if there.is_power_of_two() { there } else { there.next_power_of_two() / 2 };
            if entries <= size.entries {
                return Err(error);
            }
        }
        if let Some(times) = syn_times {
            times.ensure(2 * entries as usize)?;
        }
        self.edit(config_fd, |size| size.entries = entries)?;
        let moved = self.rehash::<A>(config_fd, config, buckets)?;
        Ok(Some(Grown { family: if self.index == 0 { 4 } else { 6 }, entries, moved }))
    }

    /// Returns the number of entries with flows that have not expired. Closed flows count: their ports are in quarantine.
    fn held<A: Address>(&self, config: &NodeConfig, entries: u32) -> io::Result<u32> {
        let flows = self.flows.map(ProtFlags::READ, 0..entries as usize)?;
        let now = view::now(config.hz);
        let is_held = |index: &u32| {
            let state = flows
                .word64(*index as usize)
                .map_or(0, |word| word.load(std::sync::atomic::Ordering::Relaxed));
            bits_of(state) & STATE_USED != 0
                && flows.read::<FlowEntry<A>>(*index as usize).is_some_and(|flow| {
                    let now = view::not_before(&flow, config, now);
                    !is_expired(flow.proto, flow.bits(), flow.last_seen, now, config)
                })
        };
        Ok((0..entries).filter(is_held).count() as u32)
    }

    fn edit(&self, config: &OwnedFd, change: impl FnOnce(&mut FlowSize)) -> io::Result<()> {
        settings::edit(config.as_fd(), |config| config.flows.get_mut(self.index).map_or((), change))
    }

    fn size(&self, config: &OwnedFd) -> io::Result<FlowSize> {
        Ok(settings::read(config.as_fd())?.flows.get(self.index).copied().unwrap_or_default())
    }

    /// Gives the index this number of buckets, or the number that an earlier growth has begun with. Returns how many keys
    /// moved.
    fn rehash<A: Address>(&self, fd: &OwnedFd, config: &NodeConfig, wanted: u32) -> io::Result<usize> {
        let FlowSize { searched: [old, other], .. } = self.size(fd)?;
        if other == 0 && wanted == old {
            return Ok(0);
        }
        let to = if other == 0 { wanted } else { other };
        self.buckets.ensure(to.max(old) as usize)?;
        self.edit(fd, |size| size.searched[1] = to)?;
        self.buckets.wait()?;
        self.edit(fd, |size| size.buckets = to)?;
        self.buckets.wait()?;
        let FlowSize { entries, .. } = self.size(fd)?;
        let flows = self.flows.map(ProtFlags::READ | ProtFlags::WRITE, 0..entries as usize)?;
        let buckets = self.buckets.map(ProtFlags::READ | ProtFlags::WRITE, 0..self.buckets.len())?;
        let keys = Keys { flows: &flows, buckets: &buckets, number: to, seed: config.flow_seed };
        let mut moved = 0;
        for pass in 0.. {
            let pass_of = keys.pass::<A>(entries, pass < PASSES / 2);
            moved += pass_of.moved;
            if pass_of.is_done() {
                break;
            }
            if pass == PASSES {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "keys of flows stay in their old buckets",
                ));
            }
            std::thread::yield_now();
        }
        self.edit(fd, |size| size.searched[0] = to)?;
        // A program may have read the old place of a key: only now nothing reads it.
        self.buckets.wait()?;
        keys.settle::<A>(to.max(old));
        self.edit(fd, |size| size.searched[1] = 0)?;
        Ok(moved)
    }
}
