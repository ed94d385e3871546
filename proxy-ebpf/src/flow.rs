//! Connection tracking of the packet path: finding flows. `proxy_common::flow` tells how one is laid out.

mod claim;
mod index;
mod open;

pub use claim::{Block, expect as expect_entry};
pub use index::{Index, expect as expect_key};
pub use open::{Steps, open, reply_key};

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::generated::bpf_jiffies64;
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FLOW_FIN_BACKEND, FLOW_FIN_CLIENT, FLOW_REPLIED, FLOW_RESET,
    FLOW_SNAT, Flow, FlowKey, is_expired, is_over, lingers,
};
use proxy_common::{Address, Family, PROTO_UDP};

use crate::atomic;
use crate::header::same;
use crate::maps;
use crate::nat::Tuple;
use crate::net::tcp;

/// The clock, and what goes by it.
#[derive(Clone, Copy)]
pub struct Time {
    /// Low 32 bits of jiffies.
    pub now: u32,
    /// Lifetimes and sizes.
    pub config: &'static NodeConfig,
}

impl Time {
    /// This moment; `None` before the agent has told anything.
    #[inline(always)]
    pub fn now() -> Option<Self> {
        // SAFETY: the helper takes nothing and cannot fail.
        let now = unsafe { bpf_jiffies64() } as u32;
        Some(Self { now, config: maps::config()? })
    }

    /// The hash of a key.
    #[inline(always)]
    pub fn hash<A: Address>(self, key: &FlowKey<A>) -> u64 {
        key.hash(self.config.flow_seed)
    }
}

/// A flow in its place.
pub struct Tracked<F: Family> {
    /// Index of the entry.
    index: u32,
    /// Its generation when it was found.
    generation: u32,
    /// The entry. A new flow may take it while we read; see [`Tracked::is_current`].
    place: *mut Flow<F::Words>,
}

/// Whether the key is one of the flow's two.
#[inline(always)]
fn owns<A: Address>(flow: &Flow<A>, key: &FlowKey<A>) -> bool {
    flow.proto == key.proto
        && if key.direction == DIRECTION_FORWARD {
            flow.client_port == key.src_port
                && flow.frontend_port == key.dst_port
                && same(&flow.client, &key.src)
                && same(&flow.frontend, &key.dst)
        } else {
            flow.backend_port == key.src_port
                && flow.source_port == key.dst_port
                && same(&flow.backend, &key.src)
                && same(&flow.source, &key.dst)
        }
}

/// The flow that a packet belongs to, whose key has this hash. One whose time is over is none, and leaves.
#[inline(always)]
pub fn find<F: Index>(key: &FlowKey<F::Words>, hash: u64, time: Time) -> Option<Tracked<F>> {
    let found = index::find::<F>(key, hash, time.config);
    let (index, generation) = (found as u32, (found >> 32) as u32);
    let place = F::flow(index)?;
    // SAFETY: a map value, of plain integers.
    let flow = unsafe { &*place };
    let tracked = Tracked { index, generation, place };
    if is_expired(flow, time.now, time.config) {
        tracked.retire(time);
        return None;
    }
    Some(tracked)
}

impl<F: Index> Tracked<F> {
    #[inline(always)]
    fn flow(&self) -> &Flow<F::Words> {
        // SAFETY: a map value, of plain integers; what is read counts only while `is_current`.
        unsafe { &*self.place }
    }

    /// Whether the entry is still this flow's, so that what was read before belongs together: the generation is
    /// the first thing that a new flow writes.
    #[inline(always)]
    fn is_current(&self) -> bool {
        // SAFETY: a map value; volatile, so that it is read after what it vouches for.
        unsafe { read_volatile(&raw const (*self.place).generation) == self.generation }
    }

    /// `FLOW_*` bits.
    #[inline(always)]
    pub fn state(&self) -> u8 {
        self.flow().state
    }

    /// Id of the Service port.
    #[inline(always)]
    pub fn service(&self) -> u32 {
        self.flow().service
    }

    /// What a client's packet becomes; `None` if the flow is gone since it was found.
    #[inline(always)]
    pub fn to_backend(&self) -> Option<Tuple<F::Words>> {
        let flow = self.flow();
        let to = Tuple {
            src: flow.source,
            dst: flow.backend,
            src_port: flow.source_port,
            dst_port: flow.backend_port,
        };
        self.is_current().then_some(to)
    }

    /// What a backend's packet becomes; `None` if the flow is gone since it was found.
    #[inline(always)]
    pub fn to_client(&self) -> Option<Tuple<F::Words>> {
        let flow = self.flow();
        let to = Tuple {
            src: flow.frontend,
            dst: flow.client,
            src_port: flow.frontend_port,
            dst_port: flow.client_port,
        };
        self.is_current().then_some(to)
    }

    /// Notes that a packet of the flow passed.
    #[inline(always)]
    pub fn touch(&self, direction: u8, tcp_flags: u16, time: Time) {
        let (before, last_seen) = (self.flow().state, self.flow().last_seen);
        let mut state = before;
        if direction == DIRECTION_FORWARD {
            if tcp_flags & tcp::FIN != 0 {
                state |= FLOW_FIN_CLIENT;
            }
        } else {
            state |= FLOW_REPLIED;
            if tcp_flags & tcp::FIN != 0 {
                state |= FLOW_FIN_BACKEND;
            }
        }
        if tcp_flags & tcp::RST != 0 {
            state |= FLOW_RESET;
        }
        // SAFETY: a map value. Two CPUs may write the state at once; the bit that is lost comes again with the
        // next segment, or the flow ends by its lifetime.
        unsafe {
            if state != before {
                write_volatile(&raw mut (*self.place).state, state);
            }
            // Most packets fall into the same jiffy: then the line stays shared between the CPUs.
            if last_seen != time.now {
                write_volatile(&raw mut (*self.place).last_seen, time.now);
            }
        }
    }

    /// Whether the key of the replies is gone. It is noticed after a pause: to look at each packet would cost a
    /// second lookup.
    #[inline(always)]
    pub fn has_lost_reply_key(&self, time: Time) -> bool {
        let flow = self.flow();
        time.now.wrapping_sub(flow.last_seen) > time.config.hz
            && !index::stands::<F>(self.index, flow, DIRECTION_REPLY)
    }

    /// Adds the key of the replies again. Another flow may have it by now: then that one has the replies.
    #[inline(always)]
    pub fn mend(&self, time: Time) {
        let hash = time.hash(&self.flow().reply_key());
        F::add_key(self.index, u32::from(DIRECTION_REPLY), hash);
    }

    /// Ends the flow: both keys go, and the entry is free. Nothing happens if it is another flow's by now.
    #[inline(always)]
    pub fn release(&self) {
        let word = claim::word_of(self.place);
        // SAFETY: inside the entry.
        let old = unsafe { read_volatile(word) };
        let keys = index::Keys::of(self.flow());
        if self.is_current() {
            keys.remove::<F>(self.index);
            // SAFETY: as above. If the exchange fails, a new flow has taken the entry.
            unsafe { atomic::compare_exchange32(word, old, claim::freed(old)) };
        }
    }

    /// Ends the flow for its client, who may begin a new one. While the backend may be in `TIME_WAIT`, the key of the
    /// replies stays, and the entry until it is needed: other clients are not to get the source port.
    #[inline(always)]
    pub fn retire(&self, time: Time) {
        let flow = self.flow();
        if flow.state & FLOW_SNAT == 0 || !lingers(flow, time.now, time.config.hz) {
            return self.release();
        }
        let keys = index::Keys::of(flow);
        if self.is_current() {
            keys.remove_forward::<F>(self.index);
        }
    }

    /// Whether a client's packet goes on to the backend that the flow has.
    ///
    /// TCP, and SCTP like it, stays with a backend that left the Service, as with kube-proxy: the backend may still
    /// answer. UDP, and TCP that never had an answer, chooses again. A SYN on a flow that both ends are done with begins a new one.
    #[inline(always)]
    pub fn continues(&self, tcp_flags: u16) -> bool {
        let flow = self.flow();
        let has_connections = flow.proto != PROTO_UDP;
        if has_connections && tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN && is_over(flow.state) {
            return false;
        }
        if has_connections && flow.state & FLOW_REPLIED != 0 {
            return true;
        }
        F::backend(flow.backend_id).is_some_and(|b| {
            b.state == BACKEND_ACTIVE
                && b.service == flow.service
                && b.port == flow.backend_port
                && same(&b.addr, &flow.backend)
        })
    }
}
