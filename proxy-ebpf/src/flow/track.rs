//! Lookup of a packet's flow, and the effect of the packet on its flow.

use proxy_common::PROTO_TCP;
use proxy_common::PROTO_UDP;
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::conntrack::{
    ASSURED, CLOSES, RST_BACKEND, RST_CLIENT, SEEN_REPLY, Segment, has_numbers_of, is_closed, is_expired,
    is_moving, is_reset_by_client, is_syn_unanswered, keeps_ports, next, next_dsr, next_seq, tcp, with_syn,
};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_CLAIMED, STATE_DIRECT, STATE_RESET, STATE_SNAT,
    STATE_SYN, bits_of, frontend_window, generation_of, has_reply_key, holds_flow, is_encapsulated,
    with_bits,
};

use super::index;
use super::memory::EntryRef as _;
use crate::context::{Packet, Tuple};
use crate::env::{FlowTable, Time, Words};
use crate::header::same;
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, opaque, opaque_to_verifier};

/// A flow that was found.
pub struct Tracked<M: FlowTable> {
    maps: M,
    /// Number of its entry.
    pub index: u32,
    /// The state word at the time of the lookup: the entry held a flow ([`holds_flow`]). A change of the flow expects this
    /// word, so it never changes an entry that another CPU has claimed.
    state: u64,
    /// The entry. A new flow may take it while it is read: the fields that were read are valid only if the generation is
    /// unchanged afterwards.
    pub entry: M::Entry,
}

/// Returns the flow of a packet. `hash` is the hash of `key`. An expired flow is removed, and `None` is returned.
#[inline(always)]
pub fn find<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64, time: Time) -> Option<Tracked<M>> {
    tracked(maps, index::find(maps, key, hash), time)
}

/// Returns the same as [`find`], but leaves an expired flow in place.
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

/// The hash of a key; 0 before the agent has written `config`. For code that does not run for every packet.
pub fn hash_key<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>) -> u64 {
    maps.config().map_or(0, |config| key.hash(config.flow_seed))
}

/// Returns the same as [`find`], by calls of subprograms: for code that does not run for every packet.
#[inline(always)]
pub fn find_called<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>) -> Option<Tracked<M>> {
    find_hashed(maps, key, maps.hash_key(key))
}

/// Returns the same as [`find_called`], for a key whose hash is known.
#[inline(always)]
pub fn find_hashed<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64) -> Option<Tracked<M>> {
    let found = maps.find_key(key, hash);
    let flow = as_found(maps, found & !EXPIRED)?;
    if found & EXPIRED != 0 {
        flow.expire();
        return None;
    }
    Some(flow)
}

/// Whether a key has a flow that has not expired. An expired flow stays.
#[inline(always)]
pub fn exists<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>) -> bool {
    // `NO_FLOW_GENERATION` has this bit, too.
    maps.find_key(key, maps.hash_key(key)) & EXPIRED == 0
}

/// In the result of [`find_key`]: the flow has expired. No index has this bit.
const EXPIRED: u64 = 1 << 31;

/// Returns the flow of a key as a number: the index, and the generation in the upper half; with [`EXPIRED`] if the caller is to
/// remove the flow. [`index::NO_FLOW_GENERATION`]: there is no flow. It does not remove the flow itself, since two nested calls
/// would need too much stack.
#[inline(always)]
pub fn find_key<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64) -> u64 {
    let Some(time) = maps.time() else { return index::NO_FLOW_GENERATION };
    let found = index::find(maps, key, hash);
    let Some(flow) = as_found(maps, found) else { return index::NO_FLOW_GENERATION };
    if flow.is_expired(time) { found | EXPIRED } else { found }
}

/// Returns the flow for a number from the index, if its entry still holds the same flow.
#[inline(always)]
pub fn as_found<M: FlowTable>(maps: M, found: u64) -> Option<Tracked<M>> {
    let (index, generation) = (found as u32, (found >> 32) as u32);
    let flow = Tracked::at(maps, index)?;
    (generation_of(flow.state) == generation).then_some(flow)
}

/// Returns the flow for a number from the index; an expired flow is removed, and `None` is returned.
#[inline(always)]
pub fn tracked<M: FlowTable>(maps: M, found: u64, time: Time) -> Option<Tracked<M>> {
    let tracked = as_found(maps, found)?;
    if tracked.is_expired(time) {
        tracked.expire();
        return None;
    }
    Some(tracked)
}

/// Ends the flow of an entry if its state word is still `state`: does what [`Tracked::remove`] does, or what
/// [`Tracked::expire`] does.
#[inline(always)]
pub fn end<M: FlowTable>(maps: M, index: u32, state: u64, removes: bool) -> bool {
    let (Some(time), Some(entry)) = (maps.time(), maps.entry(index)) else { return false };
    let flow = Tracked { maps, index, state, entry };
    if removes {
        flow.remove_here()
    } else {
        flow.expire_here(time);
        true
    }
}

/// Updates the flow of an entry, whose state word is `state`, for one of its packets; see [`Tracked::touch`].
#[inline(always)]
pub fn touch<M: FlowTable>(
    maps: M,
    packet: &Packet<Words<M>>,
    index: u32,
    state: u64,
    direction: u32,
) -> bool {
    let (Some(time), Some(entry)) = (maps.time(), maps.entry(index)) else { return true };
    Tracked { maps, index, state, entry }.touch(packet, direction as u8, time)
}

/// Adds the bits of a FIN or RST to the flow of an entry after another CPU has changed its state to `state`: both ends may close
/// at the same moment. All other changes are repeated by the next segment.
#[inline(always)]
pub fn close<M: FlowTable>(maps: M, index: u32, state: u64, closes: u32, was: u64) {
    let Some(entry) = maps.entry(index) else { return };
    let (backend, bits) = (entry.backend_id(), bits_of(state) | closes);
    if holds_flow(state)
        && generation_of(state) == generation_of(was)
        && bits != bits_of(state)
        && entry.state().compare_exchange(state, with_bits(state, bits)) == state
    {
        load::changed(maps, backend, bits_of(state), bits);
    }
}

/// Returns the fields of a packet that the state machine uses.
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
    /// Returns the flow that the entry `index` holds now; `None` if it holds none, also while another CPU creates or removes
    /// one. The only constructor.
    #[inline(always)]
    pub fn at(maps: M, index: u32) -> Option<Self> {
        let entry = maps.entry(index)?;
        let state = entry.state().load();
        holds_flow(state).then_some(Self { maps, index, state, entry })
    }

    /// Returns the `STATE_*` and connection bits.
    #[inline(always)]
    pub fn bits(&self) -> u32 {
        bits_of(self.state)
    }

    /// Returns the number of the flow, for [`as_found`]: the index, and the generation in the upper half.
    #[inline(always)]
    pub fn number(&self) -> u64 {
        u64::from(generation_of(self.state)) << 32 | u64::from(self.index)
    }

    /// Whether the flow has been silent for longer than its timeout.
    #[inline(always)]
    fn is_expired(&self, time: Time) -> bool {
        is_expired(self.entry.proto(), self.bits(), self.entry.last_seen().load(), time.now, time.config)
    }

    /// Whether the fields that were read from the entry belong to this flow. `witness` is computed from those fields.
    #[inline(always)]
    fn is_current(&self, witness: u64) -> bool {
        generation_of(self.entry.state().load_after(witness)) == generation_of(self.state)
    }

    /// Returns the tuple to which a client's packet is translated; `None` if the flow has ended since it was found.
    #[inline(always)]
    pub fn to_backend(&self) -> Option<Tuple<Words<M>>> {
        let (tuple, witness) = self.entry.to_backend();
        self.is_current(witness).then_some(tuple)
    }

    /// Returns the tuple to which a backend's packet is translated; `None` if the flow has ended since it was found.
    #[inline(always)]
    pub fn to_client(&self) -> Option<Tuple<Words<M>>> {
        let (tuple, witness) = self.entry.to_client();
        self.is_current(witness).then_some(tuple)
    }

    /// Whether a packet of a closed flow's ports belongs to the flow, by its sequence numbers; for SCTP, which has none, by its
    /// chunk.
    #[inline(always)]
    pub fn has_numbers_of(&self, packet: &Packet<Words<M>>, direction: u8) -> bool {
        if packet.key.proto != PROTO_TCP {
            return packet.tcp_flags & tcp::SYN == 0;
        }
        let seq = [self.entry.seq(DIRECTION_FORWARD).load(), self.entry.seq(DIRECTION_REPLY).load()];
        has_numbers_of(self.bits(), segment(packet, direction), seq)
    }

    /// Updates the flow for one of its packets. Returns `false` for a RST or FIN out of the window, which does not close
    /// the flow.
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
        if direction == DIRECTION_FORWARD && segment.tcp_flags & tcp::RST == 0 && !is_moving(bits) {
            // The backend serves the Service again. If it leaves once more, the removal delay starts anew.
            bits &= !STATE_RESET;
        }
        if direction == DIRECTION_FORWARD
            && proto != PROTO_UDP
            && is_encapsulated(bits)
            && !change.out_of_window
        {
            bits = next_dsr(bits, packet.tcp_flags);
        }
        let last_seen = entry.last_seen();
        if proto != PROTO_UDP {
            let is_clients_syn = direction == DIRECTION_FORWARD && is_syn(packet.tcp_flags);
            bits = with_syn(bits, is_clients_syn, time.now.wrapping_sub(last_seen.load()), time.config.hz);
        }
        bits = opaque_to_verifier(u64::from(bits), self.state) as u32;
        // Most packets arrive in the same tick as the previous one. The field is not written then, so that the cache line
        // stays shared between the CPUs.
        if last_seen.load() != time.now {
            last_seen.store(time.now);
        }
        if proto == PROTO_TCP && !change.out_of_window {
            let (moved, known) = next_seq(bits, segment, seq);
            bits = known;
            // The upper half of a sequence number changes once in 64 KiB.
            if moved[0] != seq[0] {
                entry.seq(DIRECTION_FORWARD).store(moved[0]);
            }
            if moved[1] != seq[1] {
                entry.seq(DIRECTION_REPLY).store(moved[1]);
            }
        }
        if bits != self.bits() {
            // Read before the exchange: after it, another flow may have the entry.
            let (backend, service, created) = (entry.backend_id(), entry.service(), entry.created());
            let state = entry.state().compare_exchange(self.state, with_bits(self.state, bits));
            if state == self.state {
                load::touched(self.maps, backend, self.bits(), bits, created);
                if self.maps.measures_latency() && is_unreplied_syn(self.bits()) && bits & SEEN_REPLY != 0 {
                    let refused = packet.tcp_flags & tcp::RST != 0;
                    self.maps.syn_answered(self.index, service, backend, refused);
                }
            } else if bits & CLOSES != 0 {
                self.maps.close_flow(self.index, state, bits & CLOSES, self.state);
            }
        }
        !change.out_of_window
    }

    /// Does the same as [`Self::touch`], by a call of a subprogram: for code that does not run for every packet.
    #[inline(always)]
    pub fn touch_called(&self, packet: &Packet<Words<M>>, direction: u8) -> bool {
        self.maps.touch_flow(packet, self.index, self.state, u32::from(direction))
    }

    /// Whether the frontend of a UDP flow has to be looked up again: with the client's first packet in every 256 jiffies. Nothing else
    /// reports that the frontend now belongs to another Service.
    #[inline(always)]
    pub fn needs_frontend_check(&self, time: Time) -> bool {
        let changed = u64::from(frontend_window(time.now) ^ self.entry.seq(DIRECTION_FORWARD).load());
        // Without a branch. A direct flow has no frontend.
        let is_direct = u64::from(self.bits() & STATE_DIRECT) >> STATE_DIRECT.trailing_zeros();
        opaque(changed * (1 - is_direct)) != 0 && self.entry.proto() == PROTO_UDP
    }

    /// Notes that the frontend of a UDP flow was looked up.
    #[inline(always)]
    pub fn note_frontend_check(&self, time: Time) {
        self.entry.seq(DIRECTION_FORWARD).store(frontend_window(time.now));
    }

    /// Whether the last packet passed more than a second ago. A packet that another CPU has seen after `time` counts as
    /// recent.
    #[inline(always)]
    pub fn is_silent(&self, time: Time) -> bool {
        time.now.wrapping_sub(self.entry.last_seen().load()).cast_signed() > time.config.hz.cast_signed()
    }

    /// Whether the reply key is missing from the index. Checked only after a pause of a second, because a check for each
    /// packet would cost a second lookup.
    #[inline(always)]
    pub fn has_lost_reply_key(&self, time: Time) -> bool {
        time.now.wrapping_sub(self.entry.last_seen().load()) > time.config.hz
            && !index::is_linked(self.maps, self.index, self.entry, DIRECTION_REPLY)
            && has_reply_key(opaque(u64::from(self.bits())) as u32)
    }

    /// Adds the reply key again. If another flow has the key by now, that flow gets the replies.
    #[inline(always)]
    pub fn repair_reply_key(&self, time: Time) {
        self.add_key_again(DIRECTION_REPLY, time);
    }

    /// Adds the forward key again, if it is missing from the index.
    #[inline(always)]
    pub fn repair_forward_key(&self, time: Time) {
        if !index::is_linked(self.maps, self.index, self.entry, DIRECTION_FORWARD) {
            self.add_key_again(DIRECTION_FORWARD, time);
        }
    }

    /// Adds a key again. The check is repeated under the claim: if another CPU has added the key meanwhile, a second one
    /// would overwrite the position of the first, which would then never be removed.
    #[inline(always)]
    fn add_key_again(&self, direction: u8, time: Time) {
        if let Some(owned) = self.claim() {
            if !index::is_linked(self.maps, self.index, self.entry, direction) {
                let hash = time.hash(&self.entry.key(direction));
                self.maps.add_key(self.index, u32::from(direction), hash);
            }
            self.release(owned, self.bits());
        }
    }

    /// Changes the bits of the flow, unless another CPU has changed them since the flow was found.
    #[inline(always)]
    pub fn change_bits(&self, change: impl FnOnce(u32) -> u32) {
        let (backend, bits) = (self.entry.backend_id(), change(self.bits()));
        if self.entry.state().compare_exchange(self.state, with_bits(self.state, bits)) == self.state {
            load::changed(self.maps, backend, self.bits(), bits);
        }
    }

    /// Claims the entry, so that no other CPU changes it. Returns the new state word; `None` if the state has changed since
    /// the flow was found.
    #[inline(always)]
    fn claim(&self) -> Option<u64> {
        let owned = with_bits(self.state, self.bits() | STATE_CLAIMED);
        (self.entry.state().compare_exchange(self.state, owned) == self.state).then_some(owned)
    }

    /// Ends the claim.
    #[inline(always)]
    fn release(&self, owned: u64, bits: u32) {
        // The exchange cannot fail: no other CPU changes the state of a claimed entry.
        self.entry.state().compare_exchange(owned, with_bits(owned, bits));
    }

    /// Removes the flow: removes both keys and frees the entry. Does nothing and returns `false` if the state has changed
    /// since the flow was found.
    #[inline(always)]
    pub fn remove(&self) -> bool {
        self.maps.end_flow(self.index, self.state, true)
    }

    #[inline(always)]
    fn remove_here(&self) -> bool {
        let Some(owned) = self.claim() else { return false };
        load::changed(self.maps, self.entry.backend_id(), self.bits(), 0);
        self.maps.unlink(self.index);
        self.release(owned, 0);
        true
    }

    /// Ends the flow for its client, which may then begin a new one. With SNAT, the reply key and the entry stay while the
    /// backend may be in `TIME_WAIT`, until the entry is evicted: no other client may get the source port. Not while the index grows.
    #[inline(always)]
    pub fn expire(&self) {
        self.maps.end_flow(self.index, self.state, false);
    }

    #[inline(always)]
    fn expire_here(&self, time: Time) {
        let (entry, last_seen) = (self.entry, self.entry.last_seen().load());
        let waits = self.bits() & STATE_SNAT != 0
            && keeps_ports(entry.proto(), self.bits(), last_seen, time.now, time.config.hz);
        // A key with two places would still be found by the second one.
        if !waits || index::grows::<M>(time.config) {
            self.remove_here();
        } else if let Some(owned) = self.claim() {
            index::remove_forward_key(self.maps, self.index, entry);
            self.release(owned, self.bits());
        }
    }

    /// Whether a client's packet continues the flow, to its backend. `service` is the Service port that was looked up for a
    /// SYN; 0 if there is none.
    ///
    /// TCP and SCTP stay with a backend that left the Service, as with kube-proxy: the backend may still answer. If the
    /// connection is to be reset ([`STATE_RESET`]), only the client's own RST continues, unless the backend serves again. A
    /// SYN on a closed flow begins a new flow; if only the client has reset it ([`is_reset_by_client`]), a SYN continues while the
    /// backend serves: an endpoint that has ignored a forged RST also answers a forged SYN (RFC 5961, 4). A SYN on an assured
    /// flow goes to the backend, which answers it (RFC 5961, 4); only the second unanswered SYN may end such a flow. Any other
    /// SYN, UDP and unreplied connections continue only if the backend still serves, and a SYN only if the flow belongs to
    /// `service`; otherwise a backend is selected again. A request does not continue a flow that moves ([`is_moving`]), and a SYN
    /// begins a new one, which does not move.
    #[inline(always)]
    pub fn continues(&self, tcp_flags: u16, service: u32, time: Time) -> bool {
        let (bits, entry) = (self.bits(), self.entry);
        let is_connection = entry.proto() != PROTO_UDP;
        let is_syn = is_connection && is_syn(tcp_flags);
        if is_syn {
            if is_moving(bits) || is_closed(bits) && !is_reset_by_client(bits) {
                return false;
            }
            let silent = time.now.wrapping_sub(entry.last_seen().load());
            if bits & (ASSURED | STATE_RESET | RST_CLIENT) == ASSURED
                && !is_syn_unanswered(bits, silent, time.config.hz)
            {
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
        if is_moving(bits) {
            return !is_request(tcp_flags);
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

    /// Whether a client's packet that does not continue its flow is to end the connection at the backend, before its retransmission
    /// is answered with a RST: the flow moves, and is not closed yet.
    #[inline(always)]
    pub fn is_to_be_moved(&self, tcp_flags: u16) -> bool {
        is_moving(self.bits()) && !is_closed(self.bits()) && is_request(tcp_flags)
    }

    /// Whether a client's packet that does not continue its flow is answered with a RST, because the backend left and the removal
    /// policy is `reset`. If so, the flow is closed.
    #[inline(always)]
    pub fn is_to_be_reset(&self, tcp_flags: u16) -> bool {
        let is_reset = self.bits() & STATE_RESET != 0 && !is_syn(tcp_flags);
        if is_reset {
            self.change_bits(|bits| bits | RST_BACKEND);
        }
        is_reset
    }
}

/// Whether a segment ends what a client's application has written: the request of a client that waited.
#[inline(always)]
const fn is_request(tcp_flags: u16) -> bool {
    tcp_flags & (tcp::PSH | tcp::SYN | tcp::RST) == tcp::PSH
}

/// Whether a flow began with a SYN that has not been answered yet.
#[inline(always)]
pub fn is_unreplied_syn(bits: u32) -> bool {
    bits & (STATE_SYN | SEEN_REPLY) == STATE_SYN
}

/// Whether a segment opens a connection (SYN without ACK). Most of these have no flow yet.
#[inline(always)]
pub fn is_syn(tcp_flags: u16) -> bool {
    tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}
