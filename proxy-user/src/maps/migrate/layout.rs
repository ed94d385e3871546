//! The two layouts: how an entry of each is read, claimed, filled and changed while programs do the same.
//!
//! Flows of both layouts are translated to and from [`FlowEntry`]. Writes follow the rules of the programs that own the map:
//! an entry is claimed by compare-and-exchange, filled, and then made valid.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::flow::{
    FlowEntry, STATE_CLAIMED, STATE_USED, TAG_SHIFT, bits_of, claimed, generation_of, holds_flow, with_bits,
};

use super::v2::{self, FlowV2};
use crate::maps::mapping::Mapping;

/// A layout of `flows` and `flows6`.
pub(super) trait Layout<A: Address> {
    /// Returns the state of an entry; its upper half is a number that changes with each new flow in the entry.
    fn state(flows: &Mapping, index: usize) -> Option<u64>;
    /// Returns the time of the last packet, in jiffies.
    fn last_seen(flows: &Mapping, index: usize) -> Option<&AtomicU32>;
    /// Whether an entry with this state is in use, claimed or not.
    fn is_used(state: u64) -> bool;
    /// Whether a CPU fills or empties an entry with this state.
    fn is_claimed(state: u64) -> bool;
    /// Returns a copy of the flow in an entry, in any state; `None` outside of the array.
    fn read(flows: &Mapping, index: usize, hz: u32) -> Option<FlowEntry<A>>;
    /// Whether the layout can represent this flow.
    fn takes(flow: &FlowEntry<A>) -> bool;
    /// Claims an entry whose state is `state`; returns whether it succeeded.
    fn claim(flows: &Mapping, index: usize, state: u64) -> bool;
    /// Fills a claimed entry.
    fn fill(flows: &Mapping, index: usize, flow: &FlowEntry<A>);
    /// Makes a claimed entry valid with these bits, or free if there are none.
    fn publish(flows: &Mapping, index: usize, flow: &FlowEntry<A>, bits: u32);
    /// Adds connection bits to the flow that had `state`; returns whether the entry still holds that flow.
    fn add_bits(flows: &Mapping, index: usize, state: u64, flow: &FlowEntry<A>) -> bool;
    /// Returns the position and the tag of a key.
    fn position(flows: &Mapping, index: usize, direction: usize) -> Option<(u32, u32)>;
    /// Stores the position and the tag of a key in a claimed entry.
    fn set_position(flows: &Mapping, index: usize, direction: usize, position: u32, tag: u32);
}

/// Compares and exchanges with full ordering, as the programs do.
fn exchange32(word: &AtomicU32, old: u32, new: u32) -> bool {
    word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

fn exchange64(word: &AtomicU64, old: u64, new: u64) -> bool {
    word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

fn word(flows: &Mapping, index: usize, offset: usize) -> Option<&AtomicU32> {
    flows.word32(index, offset / size_of::<u32>())
}

fn load(flows: &Mapping, index: usize, offset: usize) -> Option<u32> {
    word(flows, index, offset).map(|word| word.load(Ordering::SeqCst))
}

fn store(flows: &Mapping, index: usize, offset: usize, value: u32) {
    if let Some(word) = word(flows, index, offset) {
        word.store(value, Ordering::SeqCst);
    }
}

/// Joins two numbers of 16 bits, in memory order.
fn pair(first: u16, second: u16) -> u32 {
    let ([a, b], [c, d]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// Stores an address word by word.
fn store_address<A: Address>(flows: &Mapping, index: usize, offset: usize, address: &A) {
    let words = address.words();
    for (number, word) in words.into_iter().enumerate().take(size_of::<A>() / size_of::<u32>()) {
        store(flows, index, offset + number * size_of::<u32>(), word);
    }
}

macro_rules! store_addresses {
    ($type:ident, $flows:expr, $index:expr, $flow:expr, $($field:ident)+) => {
        $(store_address($flows, $index, offset_of!($type<A>, $field), &$flow.$field);)+
    };
}

/// The layout of this version.
pub(super) struct Current;

impl<A: Address> Layout<A> for Current
where
    FlowEntry<A>: Plain,
{
    fn state(flows: &Mapping, index: usize) -> Option<u64> {
        flows.word64(index).map(|word| word.load(Ordering::SeqCst))
    }

    fn last_seen(flows: &Mapping, index: usize) -> Option<&AtomicU32> {
        word(flows, index, offset_of!(FlowEntry<A>, last_seen))
    }

    fn is_used(state: u64) -> bool {
        bits_of(state) & STATE_USED != 0
    }

    fn is_claimed(state: u64) -> bool {
        bits_of(state) & STATE_CLAIMED != 0
    }

    fn read(flows: &Mapping, index: usize, _: u32) -> Option<FlowEntry<A>> {
        flows.read(index)
    }

    fn takes(_: &FlowEntry<A>) -> bool {
        true
    }

    fn claim(flows: &Mapping, index: usize, state: u64) -> bool {
        flows.word64(index).is_some_and(|word| exchange64(word, state, claimed(state)))
    }

    fn fill(flows: &Mapping, index: usize, flow: &FlowEntry<A>) {
        store_addresses!(FlowEntry, flows, index, flow, client frontend backend source);
        let client = offset_of!(FlowEntry<A>, client_port);
        store(flows, index, client, pair(flow.client_port, flow.frontend_port));
        store(flows, index, client + 4, pair(flow.backend_port, flow.source_port));
        store(flows, index, offset_of!(FlowEntry<A>, proto), u32::from_ne_bytes([flow.proto, 0, 0, 0]));
        store(flows, index, offset_of!(FlowEntry<A>, service), flow.service);
        store(flows, index, offset_of!(FlowEntry<A>, backend_id), flow.backend_id);
        store(flows, index, offset_of!(FlowEntry<A>, created), flow.created);
        store(flows, index, offset_of!(FlowEntry<A>, last_seen), flow.last_seen);
        store(flows, index, offset_of!(FlowEntry<A>, positions), flow.positions[0]);
        store(flows, index, offset_of!(FlowEntry<A>, positions) + 4, flow.positions[1]);
        store(flows, index, offset_of!(FlowEntry<A>, seq), pair(flow.seq[0], flow.seq[1]));
    }

    fn publish(flows: &Mapping, index: usize, _: &FlowEntry<A>, bits: u32) {
        if let Some(word) = flows.word64(index) {
            let state = word.load(Ordering::SeqCst);
            // No other CPU changes the state of a claimed entry.
            exchange64(word, state, with_bits(state, bits));
        }
    }

    fn add_bits(flows: &Mapping, index: usize, state: u64, flow: &FlowEntry<A>) -> bool {
        let Some(word) = flows.word64(index) else { return false };
        loop {
            let now = word.load(Ordering::SeqCst);
            let bits = bits_of(now);
            if generation_of(now) != generation_of(state) || !holds_flow(now) {
                return false;
            }
            if exchange64(word, now, with_bits(now, bits | flow.bits() & v2::CONNECTION)) {
                return true;
            }
        }
    }

    fn position(flows: &Mapping, index: usize, direction: usize) -> Option<(u32, u32)> {
        let position = load(flows, index, offset_of!(FlowEntry<A>, positions) + 4 * direction)?;
        let [.., forward, reply] = load(flows, index, offset_of!(FlowEntry<A>, proto))?.to_ne_bytes();
        Some((position, u32::from(if direction == 0 { forward } else { reply }) << TAG_SHIFT))
    }

    fn set_position(flows: &Mapping, index: usize, direction: usize, position: u32, tag: u32) {
        let tags = offset_of!(FlowEntry<A>, proto);
        store(flows, index, offset_of!(FlowEntry<A>, positions) + 4 * direction, position);
        let [proto, _, mut forward, mut reply] = load(flows, index, tags).unwrap_or_default().to_ne_bytes();
        *(if direction == 0 { &mut forward } else { &mut reply }) = (tag >> TAG_SHIFT) as u8;
        store(flows, index, tags, u32::from_ne_bytes([proto, 0, forward, reply]));
    }
}

/// The layout of [`v2`].
pub(super) struct Second;

impl Second {
    /// Returns the word with protocol and state.
    fn word<A>(flows: &Mapping, index: usize) -> Option<&AtomicU32> {
        word(flows, index, offset_of!(FlowV2<A>, proto))
    }

    fn bits(state: u64) -> u8 {
        let [_, bits, ..] = (state as u32).to_ne_bytes();
        bits
    }
}

impl<A: Address> Layout<A> for Second
where
    FlowV2<A>: Plain,
{
    fn state(flows: &Mapping, index: usize) -> Option<u64> {
        let generation = load(flows, index, offset_of!(FlowV2<A>, generation))?;
        let word = Self::word::<A>(flows, index)?.load(Ordering::SeqCst);
        Some(u64::from(generation) << 32 | u64::from(word))
    }

    fn last_seen(flows: &Mapping, index: usize) -> Option<&AtomicU32> {
        word(flows, index, offset_of!(FlowV2<A>, last_seen))
    }

    fn is_used(state: u64) -> bool {
        Self::bits(state) & v2::FLOW_USED != 0
    }

    fn is_claimed(state: u64) -> bool {
        Self::bits(state) & v2::FLOW_CLAIMED != 0
    }

    fn read(flows: &Mapping, index: usize, hz: u32) -> Option<FlowEntry<A>> {
        flows.read::<FlowV2<A>>(index).map(|flow| v2::to_current(&flow, hz))
    }

    fn takes(flow: &FlowEntry<A>) -> bool {
        v2::can_represent(flow)
    }

    fn claim(flows: &Mapping, index: usize, state: u64) -> bool {
        let [proto, ..] = (state as u32).to_ne_bytes();
        let claimed = u32::from_ne_bytes([proto, v2::FLOW_USED | v2::FLOW_CLAIMED, 0, 0]);
        let taken = Self::word::<A>(flows, index).is_some_and(|word| exchange32(word, state as u32, claimed));
        if taken {
            // Programs, too, write the generation first when a new flow begins.
            store(flows, index, offset_of!(FlowV2<A>, generation), generation_of(state).wrapping_add(1));
        }
        taken
    }

    fn fill(flows: &Mapping, index: usize, flow: &FlowEntry<A>) {
        store_addresses!(FlowV2, flows, index, flow, client frontend backend source);
        let client = offset_of!(FlowV2<A>, client_port);
        store(flows, index, client, pair(flow.client_port, flow.frontend_port));
        store(flows, index, client + 4, pair(flow.backend_port, flow.source_port));
        let claimed = [flow.proto, v2::FLOW_USED | v2::FLOW_CLAIMED, 0, 0];
        store(flows, index, offset_of!(FlowV2<A>, proto), u32::from_ne_bytes(claimed));
        store(flows, index, offset_of!(FlowV2<A>, service), flow.service);
        store(flows, index, offset_of!(FlowV2<A>, backend_id), flow.backend_id);
        store(flows, index, offset_of!(FlowV2<A>, created), flow.created);
        store(flows, index, offset_of!(FlowV2<A>, last_seen), flow.last_seen);
        for direction in 0..2 {
            <Self as Layout<A>>::set_position(flows, index, direction, flow.positions[direction], 0);
        }
    }

    fn publish(flows: &Mapping, index: usize, flow: &FlowEntry<A>, bits: u32) {
        if let Some(word) = Self::word::<A>(flows, index) {
            word.store(u32::from_ne_bytes([flow.proto, v2::state_of(bits), 0, 0]), Ordering::SeqCst);
        }
    }

    fn add_bits(flows: &Mapping, index: usize, state: u64, flow: &FlowEntry<A>) -> bool {
        let Some(word) = Self::word::<A>(flows, index) else { return false };
        loop {
            let now = word.load(Ordering::SeqCst);
            let generation = load(flows, index, offset_of!(FlowV2<A>, generation));
            let [proto, bits, ..] = now.to_ne_bytes();
            if generation != Some(generation_of(state))
                || bits & (v2::FLOW_USED | v2::FLOW_CLAIMED) != v2::FLOW_USED
            {
                return false;
            }
            let bits = bits | v2::state_of(flow.bits() & v2::CONNECTION);
            if exchange32(word, now, u32::from_ne_bytes([proto, bits, 0, 0])) {
                return true;
            }
        }
    }

    fn position(flows: &Mapping, index: usize, direction: usize) -> Option<(u32, u32)> {
        let position = load(flows, index, offset_of!(FlowV2<A>, places) + 4 * direction)?;
        Some((position, load(flows, index, offset_of!(FlowV2<A>, tags) + 4 * direction)?))
    }

    fn set_position(flows: &Mapping, index: usize, direction: usize, position: u32, tag: u32) {
        store(flows, index, offset_of!(FlowV2<A>, places) + 4 * direction, position);
        store(flows, index, offset_of!(FlowV2<A>, tags) + 4 * direction, tag);
    }
}
