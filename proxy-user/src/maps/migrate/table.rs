//! A flow table of either layout. Flows are found, added and removed by the rules of its programs, while they do the same.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use proxy_common::Address;
use proxy_common::PROTO_UDP;
use proxy_common::conntrack::{ASSURED, in_time_wait, is_closed, is_half_closed};
use proxy_common::flow::{FlowEntry, FlowKey, NO_POSITION, STATE_CLAIMED, bits_of, tag};

use super::index::Index;
use super::layout::Layout;
use crate::maps::mapping::Mapping;

/// Parameters of a table, from its `config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub entries: u32,
    pub buckets: u32,
    pub seed: u32,
    pub hz: u32,
}

/// State and `last_seen` of an entry when it was last read.
type Seen = (u64, u32);

/// A flow table.
pub(super) struct Table<A, L> {
    flows: Mapping,
    index: Index,
    sizes: Sizes,
    /// Where the search for free entries continues, downwards: the programs search upwards.
    cursor: u32,
    seen: Vec<Seen>,
    /// Entries that a pass with [`Scope::Hot`] reads.
    hot: BTreeSet<u32>,
    /// The newest `last_seen` of all flows that were read, in jiffies.
    latest: Option<u32>,
    /// The time of this pass, in jiffies.
    now: u32,
    /// By [`Rank`]: whether this pass has searched the table in vain.
    exhausted: [bool; RANKS.len()],
    layout: PhantomData<(A, L)>,
}

/// Entries by which a CPU advances the clock hand at a time.
const WINDOW: u32 = 16;

/// The entries that a pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All entries.
    All,
    /// Entries where new flows begin: those behind the last new flow, as the clock hand of its CPU continues there.
    Hot,
}

/// What happened to one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    Added,
    Updated,
    /// The table has a newer flow with one of the keys.
    Newer,
    /// The flow is closed, and either not in quarantine or without a free entry.
    Over,
    NoRoom,
}

/// The entries that a flow may take.
#[derive(Clone, Copy, Debug)]
enum Rank {
    /// Free entries.
    Free,
    /// Entries of closed flows whose source ports may be used again.
    Over,
    /// Entries of closed flows.
    Closed,
    /// Entries of flows that are not assured.
    Unassured,
}

/// All ranks, in the order in which they are tried.
const RANKS: [Rank; 4] = [Rank::Free, Rank::Over, Rank::Closed, Rank::Unassured];

impl<A: Address, L: Layout<A>> Table<A, L> {
    pub(super) fn new(flows: Mapping, index: Mapping, sizes: Sizes) -> Self {
        let sizes = Sizes { entries: sizes.entries.min(flows.len() as u32), ..sizes };
        let seen = vec![(0, 0); sizes.entries as usize];
        Self {
            flows,
            index: Index::new(index, sizes.buckets),
            sizes,
            cursor: 0,
            seen,
            hot: BTreeSet::new(),
            latest: None,
            now: 0,
            exhausted: [false; RANKS.len()],
            layout: PhantomData,
        }
    }

    /// Returns the flows that have changed since they were last read.
    pub(super) fn changes(&mut self, scope: Scope) -> Vec<FlowEntry<A>> {
        if scope == Scope::All {
            self.hot.clear();
        }
        let (mut changed, mut next) = (Vec::new(), 0);
        // A new flow adds the entries behind it to `hot`: the pass finds all flows that began since the last pass, however
        // many.
        while let Some(index) = match scope {
            Scope::All => Some(next).filter(|index| *index < self.sizes.entries),
            Scope::Hot => self.hot.range(next..).next().copied(),
        } {
            changed.extend(self.changed(index));
            next = index + 1;
        }
        // The newest packet is the clock: by it, no flow seems older than it is.
        for flow in &changed {
            if self.latest.is_none_or(|latest| flow.last_seen.wrapping_sub(latest).cast_signed() > 0) {
                self.latest = Some(flow.last_seen);
            }
        }
        changed
    }

    /// Returns the newest `last_seen` of all flows that were read, in jiffies.
    pub(super) fn latest(&self) -> u32 {
        self.latest.unwrap_or_default()
    }

    /// Starts a pass, in which all ranks are searched again; `now` is in jiffies.
    pub(super) fn begin_pass(&mut self, now: u32) {
        self.now = now;
        self.exhausted = [false; RANKS.len()];
    }

    /// Whether the source port of a closed flow is in quarantine because its backend may be in `TIME_WAIT`.
    pub(super) fn is_quarantined(&self, flow: &FlowEntry<A>) -> bool {
        in_time_wait(flow.proto, flow.bits(), flow.last_seen, self.now, self.sizes.hz)
    }

    /// Forgets which flows were read, so that all entries look as if programs had written them.
    #[cfg(test)]
    pub(super) fn forget(&mut self) {
        self.seen.fill((0, 0));
    }

    /// Writes a flow into an entry like programs do, but without its keys.
    #[cfg(test)]
    pub(super) fn begin_at(&mut self, index: u32, flow: &FlowEntry<A>) {
        let state = L::state(&self.flows, index as usize).unwrap_or_default();
        assert!(L::claim(&self.flows, index as usize, state));
        L::fill(&self.flows, index as usize, flow);
        L::publish(&self.flows, index as usize, flow, flow.bits());
    }

    fn look(&self, index: u32) -> Option<Seen> {
        let state = L::state(&self.flows, index as usize)?;
        Some((state, L::last_seen(&self.flows, index as usize)?.load(Ordering::SeqCst)))
    }

    fn note(&mut self, index: u32) {
        if let (Some(now), Some(seen)) = (self.look(index), self.seen.get_mut(index as usize)) {
            *seen = now;
        }
    }

    /// Returns the flow in an entry that has changed since it was last read.
    fn changed(&mut self, index: u32) -> Option<FlowEntry<A>> {
        let now = self.look(index)?;
        let seen = self.seen.get_mut(index as usize)?;
        if *seen == now || L::is_claimed(now.0) {
            return None;
        }
        let before = std::mem::replace(seen, now);
        if !L::is_used(now.0) {
            return None;
        }
        if before.0 >> 32 != now.0 >> 32 {
            self.hot.extend((index..=index + WINDOW).map(|next| next % self.sizes.entries));
        }
        let flow = L::read(&self.flows, index as usize, self.sizes.hz)?;
        if L::state(&self.flows, index as usize) != Some(now.0) {
            // A program is changing the entry: the next pass reads it again.
            if let Some(seen) = self.seen.get_mut(index as usize) {
                *seen = before;
            }
            return None;
        }
        Some(flow)
    }

    /// Returns the entry that holds a key, and its state.
    pub(super) fn find(&self, key: &FlowKey<A>) -> Option<(u32, u64)> {
        self.index.candidates(key.hash(self.sizes.seed)).find_map(|index| {
            let state = L::state(&self.flows, index as usize)?;
            let holds = L::is_used(state) && !L::is_claimed(state) && self.has_key(index, key);
            holds.then_some((index, state))
        })
    }

    fn has_key(&self, index: u32, key: &FlowKey<A>) -> bool {
        let flow = L::read(&self.flows, index as usize, self.sizes.hz);
        flow.is_some_and(|flow| flow.key(key.direction) == *key)
    }

    /// Returns the flow in an entry.
    pub(super) fn flow(&self, index: u32) -> Option<FlowEntry<A>> {
        L::read(&self.flows, index as usize, self.sizes.hz)
    }

    /// Adds a flow, or updates it if the table has it. Of two flows with the same key, the newer one stays. A closed flow
    /// needs only its reply key, which keeps its source port from other clients: a newer flow may have its forward key.
    pub(super) fn put(&mut self, flow: &FlowEntry<A>) -> Put {
        let is_over = is_closed(flow.bits());
        for direction in [1, 0] {
            let Some((index, state)) = self.find(&flow.key(direction)) else { continue };
            let Some(there) = self.flow(index) else { continue };
            if is_same(&there, flow) {
                return self.update(index, state, &there, flow);
            }
            if self.wins_key_over(flow, &there) {
                if direction == 0 && self.is_quarantined(&there) {
                    self.remove_forward(index, state);
                } else {
                    self.remove(index, state);
                }
            } else if direction == 1 || !is_over {
                return Put::Newer;
            }
        }
        if is_over && !self.is_quarantined(flow) { Put::Over } else { self.add(flow) }
    }

    /// Whether `flow` takes a key from `there`. The newer flow does, as the current packets are its packets. Exception: of
    /// two flows that began within a second, the older one does if its connection is open, because the newer flow began in
    /// mid-connection, in a program that did not know the connection yet.
    fn wins_key_over(&self, flow: &FlowEntry<A>, there: &FlowEntry<A>) -> bool {
        let age = flow.created.wrapping_sub(there.created).cast_signed();
        let (older, is_older) = if age <= 0 { (flow, true) } else { (there, false) };
        let is_one_connection = age != 0
            && age.unsigned_abs() < self.sizes.hz
            && flow.proto != PROTO_UDP
            && !is_half_closed(older.bits())
            && !is_closed(older.bits());
        is_one_connection == is_older && age != 0
    }

    fn update(&mut self, index: u32, state: u64, there: &FlowEntry<A>, flow: &FlowEntry<A>) -> Put {
        if let Some(word) = L::last_seen(&self.flows, index as usize)
            && flow.last_seen.wrapping_sub(there.last_seen).cast_signed() > 0
        {
            word.store(flow.last_seen, Ordering::SeqCst);
        }
        L::add_bits(&self.flows, index as usize, state, flow);
        self.note(index);
        Put::Updated
    }

    /// Ends a flow whose key is taken by a flow of the other table.
    fn remove(&mut self, index: u32, state: u64) {
        let Some(flow) = self.flow(index) else { return };
        if !L::claim(&self.flows, index as usize, state) {
            return;
        }
        self.remove_keys(index);
        L::publish(&self.flows, index as usize, &flow, 0);
        self.note(index);
    }

    /// Removes the forward key of a closed flow, as programs do when the client opens another connection with its port. The
    /// source port stays in quarantine.
    fn remove_forward(&mut self, index: u32, state: u64) {
        let Some((position, tag)) = L::position(&self.flows, index as usize, 0) else { return };
        if L::state(&self.flows, index as usize) == Some(state) {
            self.index.remove(position, tag, index);
        }
    }

    /// Claims an entry: a free one; else that of a closed flow; else, if `flow` is assured, that of a flow that is not. If
    /// `flow` is closed, it takes no entry whose source port is in quarantine.
    fn claim(&mut self, flow: &FlowEntry<A>) -> Option<u32> {
        let is_open = !is_closed(flow.bits());
        for (number, rank) in RANKS.into_iter().enumerate() {
            let is_allowed = match rank {
                Rank::Free | Rank::Over => true,
                Rank::Closed => is_open,
                Rank::Unassured => is_open && flow.bits() & ASSURED != 0,
            };
            if !is_allowed || self.exhausted.get(number).copied().unwrap_or_default() {
                continue;
            }
            let claimed = self.claim_of(rank);
            if claimed.is_some() {
                return claimed;
            }
            if let Some(exhausted) = self.exhausted.get_mut(number) {
                *exhausted = true;
            }
        }
        None
    }

    fn suits(&self, rank: Rank, flow: Option<&FlowEntry<A>>) -> bool {
        match (rank, flow) {
            (Rank::Free, there) => there.is_none(),
            (_, None) => false,
            (Rank::Over, Some(flow)) => is_closed(flow.bits()) && !self.is_quarantined(flow),
            (Rank::Closed, Some(flow)) => is_closed(flow.bits()),
            (Rank::Unassured, Some(flow)) => flow.bits() & ASSURED == 0,
        }
    }

    /// Claims an entry of this rank; `None` if there is none.
    fn claim_of(&mut self, rank: Rank) -> Option<u32> {
        for _ in 0..self.sizes.entries {
            self.cursor = self.cursor.checked_sub(1).unwrap_or(self.sizes.entries - 1);
            let state = L::state(&self.flows, self.cursor as usize)?;
            let there = if L::is_used(state) { Some(self.flow(self.cursor)?) } else { None };
            let is_free = !L::is_claimed(state) && self.suits(rank, there.as_ref());
            if is_free && L::claim(&self.flows, self.cursor as usize, state) {
                if there.is_some() {
                    self.remove_keys(self.cursor);
                }
                return Some(self.cursor);
            }
        }
        None
    }

    fn add(&mut self, flow: &FlowEntry<A>) -> Put {
        let is_over = is_closed(flow.bits());
        let Some(index) = self.claim(flow) else { return if is_over { Put::Over } else { Put::NoRoom } };
        let blank = FlowEntry { positions: [NO_POSITION; 2], tags: [0; 2], ..*flow };
        L::fill(&self.flows, index as usize, &blank);
        let put = match self.add_key(index, 1, flow) {
            Put::Added => match self.add_key(index, 0, flow) {
                _ if is_over => Put::Added,
                put => put,
            },
            put => put,
        };
        let bits = if put == Put::Added { bits_of(flow.state) & !STATE_CLAIMED } else { 0 };
        if put != Put::Added {
            self.remove_keys(index);
        }
        L::publish(&self.flows, index as usize, flow, bits);
        self.note(index);
        put
    }

    fn remove_keys(&self, index: u32) {
        for direction in 0..2 {
            if let Some((position, tag)) = L::position(&self.flows, index as usize, direction) {
                self.index.remove(position, tag, index);
            }
        }
    }

    /// Adds a key of the claimed entry `index`: first pending; valid after a check that no other entry has the key.
    fn add_key(&self, index: u32, direction: u8, flow: &FlowEntry<A>) -> Put {
        let key = flow.key(direction);
        let hash = key.hash(self.sizes.seed);
        let is_stale = |other, position| self.is_stale(other, position);
        let Some(position) = self.index.take(hash, index, is_stale) else { return Put::NoRoom };
        L::set_position(&self.flows, index as usize, usize::from(direction), position, tag(hash));
        let has_key = |other: u32| {
            L::state(&self.flows, other as usize).is_some_and(L::is_used) && self.has_key(other, &key)
        };
        if self.index.settle(hash, index, position, has_key) { Put::Added } else { Put::Newer }
    }

    /// Whether the slot at `position` is stale: the flow `index` does not refer to it.
    fn is_stale(&self, index: u32, position: u32) -> bool {
        let index = index as usize;
        let stands = |direction| {
            L::position(&self.flows, index, direction).is_some_and(|(stands_at, _)| stands_at == position)
        };
        let is_used = L::state(&self.flows, index).is_some_and(L::is_used);
        !is_used || !(stands(0) || stands(1))
    }
}

/// Whether both are the same flow.
fn is_same<A: Address>(one: &FlowEntry<A>, other: &FlowEntry<A>) -> bool {
    let keys = |flow: &FlowEntry<A>| [flow.key(0), flow.key(1)];
    one.created == other.created && keys(one) == keys(other)
}
