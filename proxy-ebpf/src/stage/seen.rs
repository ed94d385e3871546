//! The marks of clients that have direct flows (`direct_seen`). Only packets of marked clients directly to an endpoint are looked
//! up as packets of such a flow.

use proxy_common::flow::{DIRECT_ANY, FlowKey, direct_slot};

use crate::env::{FlowTable, Time, Words};
use crate::shared::Shared as _;

/// Marks the client that sends packets with this key.
#[inline(always)]
pub fn mark_direct_seen<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, time: Time) {
    mark(maps, direct_slot(&key.src, key.src_port, key.proto), time);
    mark(maps, DIRECT_ANY, time);
}

#[inline(always)]
fn mark<M: FlowTable>(maps: M, slot: u32, time: Time) {
    // Saves the store of a number that is there already, from an earlier packet of the same tick.
    if let Some(seen) = maps.direct_seen(slot)
        && seen.load() != time.now | 1
    {
        seen.store(time.now | 1);
    }
}

/// Clears the mark of a client that has no direct flow, once no client with this mark had a packet of one for the timeout of an
/// established connection, which is the longest.
#[inline(always)]
pub fn clear_direct_seen<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, time: Time) {
    clear(maps, direct_slot(&key.src, key.src_port, key.proto), time);
    clear(maps, DIRECT_ANY, time);
}

#[inline(always)]
fn clear<M: FlowTable>(maps: M, slot: u32, time: Time) {
    if let Some(seen) = maps.direct_seen(slot) {
        let at = seen.load();
        if at != 0 && time.now.wrapping_sub(at).cast_signed() > time.config.tcp_established.cast_signed() {
            seen.store(0);
        }
    }
}
