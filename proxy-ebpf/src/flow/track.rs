//! Finding the flow of a packet, and what a packet does to its flow.

use proxy_common::PROTO_TCP;
use proxy_common::PROTO_UDP;
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::conntrack::{
    ASSURED, RST_BACKEND, SEEN_REPLY, Segment, in_time_wait, is_closed, is_expired, is_syn_unanswered, next,
    noted, one_sided, tcp, with_syn,
};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_CLAIMED, STATE_DIRECT, STATE_RESET, STATE_SNAT,
    STATE_SYN, bits_of, generation_of, tunnel_of, with_bits,
};

use super::index;
use super::memory::EntryRef as _;
use crate::context::{Packet, Tuple};
use crate::env::{FlowTable, Time, Words};
use crate::header::same;
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, forget, opaque};

/// A flow that was found.
pub struct Tracked<M: FlowTable> {
    maps: M,
    /// Number of its entry.
    pub index: u32,
    /// The state word when it was found.
    pub state: u64,
    /// The entry. A new flow may take it while it is read: what was read counts if the generation is still the same.
    pub entry: M::Entry,
}

/// The flow that a packet belongs to, whose key has this hash. One that has expired is none, and is removed.
#[inline(always)]
pub fn find<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64, time: Time) -> Option<Tracked<M>> {
    tracked(maps, index::find(maps, key, hash), time)
}

/// The same, without a change: one that has expired is none, and stays.
#[inline(always)]
pub fn find_untouched<M: FlowTable>(
    maps: M,
    key: &FlowKey<Words<M>>,
    hash: u64,
    time: Time,
) -> Option<Tracked<M>> {
    let tracked = as_found(maps, index::find(maps, key, hash))?;
    if tracked.is_expired(time) { None } else { Some(tracked) }
}

/// The same by a subprogram: where it is not on the way of every packet.
#[inline(always)]
pub fn find_called<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, time: Time) -> Option<Tracked<M>> {
    as_found(maps, maps.find_key(key, time.hash(key)))
}

/// [`find`], as a number: index, and generation in the upper half; or [`index::NOTHING`].
#[inline(always)]
pub fn find_key<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64) -> u64 {
    let Some(time) = maps.time() else { return index::NOTHING };
    let found = index::find(maps, key, hash);
    if tracked(maps, found, time).is_some() { found } else { index::NOTHING }
}

/// The flow that was found under this number, if its entry is still the same flow's.
#[inline(always)]
fn as_found<M: FlowTable>(maps: M, found: u64) -> Option<Tracked<M>> {
    let (index, generation) = (found as u32, (found >> 32) as u32);
    let entry = maps.entry(index)?;
    let state = entry.state().load();
    (generation_of(state) == generation).then_some(Tracked { maps, index, state, entry })
}

#[inline(always)]
fn tracked<M: FlowTable>(maps: M, found: u64, time: Time) -> Option<Tracked<M>> {
    let tracked = as_found(maps, found)?;
    if tracked.is_expired(time) {
        tracked.expire(time);
        return None;
    }
    Some(tracked)
}

/// What the state machine is told of a packet.
#[inline(always)]
pub fn segment<A>(packet: &Packet<A>, direction: u8) -> Segment {
    Segment {
        direction,
        tcp_flags: packet.tcp_flags,
        seq: (packet.seq >> 16) as u16,
        ack: (packet.ack >> 16) as u16,
    }
}

impl<M: FlowTable> Tracked<M> {
    /// The flow in the entry of that number, as it is now.
    #[inline(always)]
    pub fn at(maps: M, index: u32) -> Option<Self> {
        let entry = maps.entry(index)?;
        Some(Self { maps, index, state: entry.state().load(), entry })
    }

    /// `STATE_*` and connection bits.
    #[inline(always)]
    pub fn bits(&self) -> u32 {
        bits_of(self.state)
    }

    /// Whether it has been silent for longer than its timeout.
    #[inline(always)]
    fn is_expired(&self, time: Time) -> bool {
        is_expired(self.entry.proto(), self.bits(), self.entry.last_seen().load(), time.now, time.config)
    }

    /// Whether what was read of the entry is this flow's. `witness`: computed from what was read.
    #[inline(always)]
    fn is_current(&self, witness: u64) -> bool {
        generation_of(self.entry.state().load_after(witness)) == generation_of(self.state)
    }

    /// What a client's packet becomes; `None` if the flow is gone since it was found.
    #[inline(always)]
    pub fn to_backend(&self) -> Option<Tuple<Words<M>>> {
        let (tuple, witness) = self.entry.to_backend();
        self.is_current(witness).then_some(tuple)
    }

    /// What a backend's packet becomes; `None` if the flow is gone since it was found.
    #[inline(always)]
    pub fn to_client(&self) -> Option<Tuple<Words<M>>> {
        let (tuple, witness) = self.entry.to_client();
        self.is_current(witness).then_some(tuple)
    }

    /// Notes a packet of the flow. Gives `false` for a reset or FIN out of the window, which changes nothing.
    #[inline(always)]
    pub fn touch(&self, packet: &Packet<Words<M>>, direction: u8, time: Time) -> bool {
        let (entry, proto) = (self.entry, packet.key.proto);
        let segment = segment(packet, direction);
        let seq = if proto == PROTO_TCP {
            [entry.seq(DIRECTION_FORWARD).load(), entry.seq(DIRECTION_REPLY).load()]
        } else {
            [0; 2]
        };
        let age = if proto == PROTO_UDP { time.now.wrapping_sub(entry.created()) } else { 0 };
        let change = next(proto, self.bits(), segment, seq, age, time.config);
        let mut bits = change.bits;
        if direction == DIRECTION_FORWARD
            && proto != PROTO_UDP
            && tunnel_of(bits) != 0
            && !change.out_of_window
        {
            bits = one_sided(bits, packet.tcp_flags);
        }
        let last_seen = entry.last_seen();
        if proto != PROTO_UDP {
            let is_clients_syn = direction == DIRECTION_FORWARD && is_syn(packet.tcp_flags);
            bits = with_syn(bits, is_clients_syn, time.now.wrapping_sub(last_seen.load()), time.config.hz);
        }
        // Most packets fall into the same tick: then the cache line stays shared between the CPUs.
        if last_seen.load() != time.now {
            last_seen.store(time.now);
        }
        if proto == PROTO_TCP && !change.out_of_window {
            let (moved, known) = noted(bits, segment, seq);
            bits = known;
            // Each changes once in 64 KiB.
            if moved[0] != seq[0] {
                entry.seq(DIRECTION_FORWARD).store(moved[0]);
            }
            if moved[1] != seq[1] {
                entry.seq(DIRECTION_REPLY).store(moved[1]);
            }
        }
        let bits = forget(u64::from(bits), self.state) as u32;
        if bits != self.bits() {
            // Read before the exchange: behind it, another flow may have the entry.
            let (backend, service) = (entry.backend_id(), entry.service());
            // If another CPU was faster, its change counts: the next segment brings ours again, or the timeout.
            if entry.state().compare_exchange(self.state, with_bits(self.state, bits)) == self.state {
                load::changed(self.maps, backend, self.bits(), bits);
                if self.maps.measures_latency() && is_unreplied_syn(self.bits()) && bits & SEEN_REPLY != 0 {
                    let refused = packet.tcp_flags & tcp::RST != 0;
                    self.maps.syn_answered(self.index, service, backend, refused);
                }
            }
        }
        !change.out_of_window
    }

    /// Whether the frontend of the flow is to be looked up again: of UDP, about once a second, since nothing else tells that the
    /// frontend is another Service's by now. Every 256 jiffies.
    #[inline(always)]
    pub fn is_looked_at(&self, time: Time) -> bool {
        let changed = u64::from((time.now ^ self.entry.last_seen().load()) >> 8);
        // Without a branch: a direct flow has no frontend.
        let is_direct = u64::from(self.bits() & STATE_DIRECT) >> STATE_DIRECT.trailing_zeros();
        opaque(changed * (1 - is_direct)) != 0 && self.entry.proto() == PROTO_UDP
    }

    /// Whether the last packet is more than a second ago. One that another CPU has seen after `time` is not.
    #[inline(always)]
    pub fn is_silent(&self, time: Time) -> bool {
        time.now.wrapping_sub(self.entry.last_seen().load()).cast_signed() > time.config.hz.cast_signed()
    }

    /// Whether the key of the replies is gone. It is noticed after a pause: to look at each packet would cost a second
    /// lookup.
    #[inline(always)]
    pub fn has_lost_reply_key(&self, time: Time) -> bool {
        time.now.wrapping_sub(self.entry.last_seen().load()) > time.config.hz
            && !index::is_linked(self.maps, self.index, self.entry, DIRECTION_REPLY)
    }

    /// Adds the key of the replies again. Another flow may have it by now: then that one has the replies.
    #[inline(always)]
    pub fn repair_reply_key(&self, time: Time) {
        self.add_key_again(DIRECTION_REPLY, time);
    }

    /// Adds the client's key again, if it is gone.
    #[inline(always)]
    pub fn repair_forward_key(&self, time: Time) {
        if !index::is_linked(self.maps, self.index, self.entry, DIRECTION_FORWARD) {
            self.add_key_again(DIRECTION_FORWARD, time);
        }
    }

    /// Not, if another CPU has done it meanwhile: the entry would forget where its key stands, and never remove it. So it is
    /// looked at once more under the claim.
    #[inline(always)]
    fn add_key_again(&self, direction: u8, time: Time) {
        if let Some(owned) = self.own() {
            if !index::is_linked(self.maps, self.index, self.entry, direction) {
                let hash = time.hash(&self.entry.key(direction));
                self.maps.add_key(self.index, u32::from(direction), hash);
            }
            self.give_back(owned, self.bits());
        }
    }

    /// Changes its bits; not, if another CPU has changed them since it was found.
    #[inline(always)]
    pub fn change_bits(&self, change: impl FnOnce(u32) -> u32) {
        let (backend, bits) = (self.entry.backend_id(), change(self.bits()));
        if self.entry.state().compare_exchange(self.state, with_bits(self.state, bits)) == self.state {
            load::changed(self.maps, backend, self.bits(), bits);
        }
    }

    /// Claims the entry, so that no other CPU changes it; `None` if it has changed since it was found. Gives its state word.
    #[inline(always)]
    fn own(&self) -> Option<u64> {
        if self.bits() & STATE_CLAIMED != 0 {
            return None;
        }
        let owned = with_bits(self.state, self.bits() | STATE_CLAIMED);
        (self.entry.state().compare_exchange(self.state, owned) == self.state).then_some(owned)
    }

    /// Ends the claim.
    #[inline(always)]
    fn give_back(&self, owned: u64, bits: u32) {
        // It cannot fail: no other CPU changes the state of a claimed entry.
        self.entry.state().compare_exchange(owned, with_bits(owned, bits));
    }

    /// Removes the flow: both keys go, and the entry is free. Nothing happens if it has changed since it was found; then it
    /// gives `false`.
    #[inline(always)]
    pub fn remove(&self) -> bool {
        let Some(owned) = self.own() else { return false };
        load::changed(self.maps, self.entry.backend_id(), self.bits(), 0);
        index::remove_key(self.maps, self.index, self.entry, DIRECTION_FORWARD);
        index::remove_key(self.maps, self.index, self.entry, DIRECTION_REPLY);
        self.give_back(owned, 0);
        true
    }

    /// Ends the flow for its client, who may begin a new one. While the backend may be in `TIME_WAIT`, the key of the replies
    /// stays, and the entry until it is evicted: other clients are not to get the source port.
    #[inline(always)]
    pub fn expire(&self, time: Time) {
        let (entry, last_seen) = (self.entry, self.entry.last_seen().load());
        let waits = self.bits() & STATE_SNAT != 0
            && in_time_wait(entry.proto(), self.bits(), last_seen, time.now, time.config.hz);
        if !waits {
            self.remove();
        } else if let Some(owned) = self.own() {
            index::remove_key(self.maps, self.index, entry, DIRECTION_FORWARD);
            self.give_back(owned, self.bits());
        }
    }

    /// Whether a client's packet goes on to the backend that the flow has. `service`: the Service that a SYN is for, as it
    /// was looked up; 0: none.
    ///
    /// TCP, and SCTP like it, stays with a backend that left the Service, as with kube-proxy: the backend may still answer.
    /// Not one that is to be reset ([`STATE_RESET`]): of that, only the client's own reset goes on.
    /// UDP, TCP that was never answered, and a SYN choose again. A SYN on a flow that is over, or that is another Service's by
    /// now, begins a new one; on any other flow it goes to the backend, which answers it (RFC 5961, 4). An assured flow is ended
    /// only by the second unanswered SYN.
    #[inline(always)]
    pub fn continues(&self, tcp_flags: u16, service: u32, time: Time) -> bool {
        let (bits, entry) = (self.bits(), self.entry);
        let is_connection = entry.proto() != PROTO_UDP;
        let is_syn = is_connection && is_syn(tcp_flags);
        if is_syn {
            if is_closed(bits) {
                return false;
            }
            let silent = time.now.wrapping_sub(entry.last_seen().load());
            if bits & (ASSURED | STATE_RESET) == ASSURED && !is_syn_unanswered(bits, silent, time.config.hz) {
                return true;
            }
            if entry.service() != service {
                return false;
            }
        }
        if bits & STATE_DIRECT != 0 {
            return true;
        }
        if is_connection && bits & (SEEN_REPLY | STATE_RESET) == SEEN_REPLY && !is_syn {
            return true;
        }
        let (id, addr, port) = entry.backend();
        let serves = self.maps.backend(id).is_some_and(|backend| {
            backend.state == BACKEND_ACTIVE
                && backend.service == entry.service()
                && backend.port == port
                && same(&backend.addr, &addr)
        });
        serves || bits & STATE_RESET != 0 && is_connection && tcp_flags & tcp::RST != 0
    }

    /// Whether a client's packet that does not go on is answered with a reset: its backend left, and the removal policy says so.
    /// Then the flow is closed.
    #[inline(always)]
    pub fn is_to_be_reset(&self, tcp_flags: u16) -> bool {
        let is_reset = self.bits() & STATE_RESET != 0 && !is_syn(tcp_flags);
        if is_reset {
            self.change_bits(|bits| bits | RST_BACKEND);
        }
        is_reset
    }
}

/// Whether a flow began with a SYN that was not answered yet.
#[inline(always)]
pub fn is_unreplied_syn(bits: u32) -> bool {
    bits & (STATE_SYN | SEEN_REPLY) == STATE_SYN
}

/// Whether a segment asks for a connection. Most such have no flow yet.
#[inline(always)]
pub fn is_syn(tcp_flags: u16) -> bool {
    tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}
