//! Connections: their state, and when they end. The reference is `nf_conntrack`.

use std::net::SocketAddr;

use super::parse::Segment;
use super::rules::{WINDOW, timeout};
use crate::forge::{ACK, FIN, RST, SYN};
use crate::scenario::{Scenario, TCP, UDP};
use crate::tunnel::MAX_HOPS;

/// A tracked connection.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts of a flow")]
pub struct Flow {
    pub proto: u8,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub backend: SocketAddr,
    /// Address and port that the endpoint sees as the client's.
    pub source: SocketAddr,
    pub service: u32,
    pub backend_id: u32,
    pub kind: Kind,
    pub state: State,
    pub created: u64,
    pub last_seen: u64,
    /// Whether the first answer updates the health of the endpoint.
    pub is_watched: bool,
    /// Whether a refusal of the same connection was hidden before: the next one reaches the client.
    pub is_last: bool,
    /// Whether the connection began with the policy for clients outside.
    pub outside: bool,
    /// Whether the client's packets are encapsulated to the endpoint's node, whose answers do not pass this node (DSR).
    pub is_tunnel: bool,
    /// How often the first packet of such a flow was encapsulated before.
    pub hops: u8,
    /// Whether the client's packets find the flow. If not, its source port is in quarantine.
    pub has_client: bool,
}

/// How the endpoint sees the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The endpoint sees the client's own address.
    Plain,
    /// The endpoint sees an address of the node.
    Snat,
    /// Like `Snat`, and the client is a process of the node.
    Local,
    /// The client has connected directly to the endpoint, while another flow has its port.
    Direct,
    /// A packet has left directly to the endpoint, with an address and a source port that are for SNAT.
    DirectEgress,
    /// A connection of the node itself, from the address and port of a frontend; its "client" is the remote end.
    Own,
}

impl Kind {
    pub fn is_snat(self) -> bool {
        matches!(self, Self::Snat | Self::Local | Self::DirectEgress)
    }

    pub fn is_direct(self) -> bool {
        matches!(self, Self::Direct | Self::DirectEgress | Self::Own)
    }
}

/// The sender of a packet of a connection; also the index of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Client = 0,
    Backend = 1,
}

/// State of a connection, as its packets show it; arrays are indexed by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that go with each other in every combination")]
pub struct State {
    /// Whether the connection began with a SYN.
    pub has_syn: bool,
    pub replied: bool,
    /// Whether the client has acknowledged the answer.
    pub assured: bool,
    pub fin: [bool; 2],
    pub rst: [bool; 2],
    /// Whether the last packet was a SYN, and the flow was half-closed, or had been silent before; or a SYN whose refusal was hidden.
    pub has_unanswered_syn: bool,
    /// Upper halves of the noted sequence numbers.
    pub seq: [Option<u16>; 2],
}

fn ahead(number: u16, noted: u16) -> i16 {
    number.wrapping_sub(noted).cast_signed()
}

fn is_near(number: u16, noted: u16) -> bool {
    (-WINDOW..=WINDOW).contains(&ahead(number, noted))
}

impl State {
    /// Returns the state after the first packet.
    pub fn begin(segment: &Segment) -> Self {
        let is_tcp = segment.proto == TCP;
        let has_syn = is_tcp && segment.flags & (SYN | ACK) == SYN;
        Self { has_syn, seq: [is_tcp.then(|| half(segment.seq)), None], ..Self::default() }
    }

    /// Whether the endpoint's segment cannot be the answer to the SYN: the client has another connection to the endpoint.
    pub fn is_of_another(&self, segment: &Segment) -> bool {
        self.has_syn && !self.replied && segment.flags & (SYN | RST) == 0
    }

    /// Whether both ends have sent FIN, or one has sent RST.
    pub fn is_closed(&self) -> bool {
        self.rst != [false; 2] || self.fin == [true; 2]
    }

    /// Whether only the client has reset an assured connection: the RST may be forged, which the endpoint then ignores.
    pub fn is_reset_by_client(&self) -> bool {
        self.assured && self.rst == [true, false] && self.fin != [true; 2]
    }

    /// Whether a packet counts: it is no RST or FIN out of the window.
    pub fn counts(&self, from: From, proto: u8, segment: &Segment) -> bool {
        if proto != TCP || segment.flags & (RST | FIN) == 0 {
            return true;
        }
        match (self.seq[from as usize], self.seq[1 - from as usize]) {
            (Some(noted), _) => is_near(half(segment.seq), noted),
            (None, Some(noted)) if segment.flags & ACK != 0 => is_near(half(segment.ack), noted),
            _ => true,
        }
    }

    /// Whether both numbers of a segment are near the noted ones; SCTP, which has none, begins with a SYN.
    pub fn has_numbers_of(&self, from: From, segment: &Segment) -> bool {
        if segment.proto != TCP {
            return segment.flags & SYN == 0;
        }
        let [own, other] = [self.seq[from as usize], self.seq[1 - from as usize]];
        own.is_none_or(|noted| is_near(half(segment.seq), noted))
            && (segment.flags & ACK == 0 || other.is_none_or(|noted| is_near(half(segment.ack), noted)))
    }

    /// Whether the client has seen the answer, by its acknowledgement number.
    pub fn acknowledges(&self, proto: u8, segment: &Segment) -> bool {
        let is_ack = self.replied && segment.flags & (ACK | SYN | RST) == ACK;
        match self.seq[From::Backend as usize] {
            Some(noted) if proto == TCP => is_ack && (0..=WINDOW).contains(&ahead(half(segment.ack), noted)),
            _ => is_ack,
        }
    }

    /// Notes sequence numbers. A sender that does not see the connection must not be able to move them.
    fn note(&mut self, from: From, segment: &Segment) {
        let (side, other) = (from as usize, 1 - from as usize);
        let (seq, ack) = (half(segment.seq), half(segment.ack));
        let (is_syn, is_ack) = (segment.flags & SYN != 0, segment.flags & ACK != 0);
        if from == From::Backend && is_syn && is_ack {
            self.seq = [Some(ack), Some(seq)];
            return;
        }
        let knows_other = is_ack && self.seq[other].is_some_and(|noted| is_near(ack, noted));
        let may_move = if is_syn {
            !self.assured
        } else {
            self.seq[side].is_none_or(|noted| is_near(seq, noted)) || knows_other
        };
        if may_move {
            self.seq[side] = Some(seq);
        }
    }

    /// Updates the state for a client's segment if the answers do not pass this node: an ACK stands for an answer, a FIN
    /// for both. A forged ACK looks the same, so the connection is never assured.
    pub fn sees_one_side(&mut self, segment: &Segment) {
        self.assured = false;
        self.replied |= segment.flags & (ACK | SYN | RST) == ACK;
        self.fin[From::Backend as usize] |= segment.flags & FIN != 0 && self.fin[From::Client as usize];
    }

    /// Updates the state for a packet, which counts or does not. `acknowledges`: the packet makes the connection assured.
    pub fn pass(&mut self, from: From, proto: u8, segment: &Segment, counts: bool, acknowledges: bool) {
        let side = from as usize;
        self.replied |= from == From::Backend;
        if !counts {
            return;
        }
        if segment.flags & RST != 0 {
            self.rst[side] = true;
        } else {
            // A sender that continues has not reset the connection.
            self.rst[side] = false;
            self.fin[side] |= segment.flags & FIN != 0;
            self.assured |= from == From::Client && acknowledges;
        }
        if from == From::Backend && self.has_unanswered_syn && segment.flags & (SYN | ACK | RST) == SYN | ACK
        {
            // The endpoint accepts a new connection on the ports of a half-closed one.
            (self.fin, self.rst) = ([false; 2], [false; 2]);
        }
        if proto == TCP {
            self.note(from, segment);
        }
    }
}

pub fn half(number: u32) -> u16 {
    (number >> 16) as u16
}

impl Flow {
    /// Whether the flow's replies have these addresses. Replies to packets for another node do not pass this one.
    pub fn has_replies(&self, proto: u8, from: SocketAddr, to: SocketAddr) -> bool {
        !self.is_tunnel && (self.proto, self.backend, self.source) == (proto, from, to)
    }

    /// Whether the endpoint has not answered yet, and its first answer updates its health.
    pub fn waits(&self) -> bool {
        let State { has_syn, replied, rst, has_unanswered_syn, .. } = &self.state;
        self.is_watched && *has_syn && !replied && !rst[From::Backend as usize] && !has_unanswered_syn
    }

    /// Whether the endpoint has refused the connection, and the client does not know.
    pub fn is_hidden(&self) -> bool {
        let State { has_syn, replied, has_unanswered_syn, .. } = &self.state;
        self.is_watched && *has_syn && !replied && *has_unanswered_syn
    }

    fn timeout(&self) -> u64 {
        let State { replied, assured, fin, rst, .. } = &self.state;
        // If the answers do not pass this node, the client's packets decide.
        let assured = &(*assured || self.is_tunnel && *replied);
        if self.proto == UDP {
            return if *assured { timeout::UDP_STREAM } else { timeout::UDP };
        }
        if *rst != [false; 2] {
            timeout::TCP_CLOSE
        } else if *fin == [true; 2] {
            timeout::TCP_TIME_WAIT
        } else if !replied {
            timeout::TCP_SYN_SENT
        } else if !assured {
            timeout::TCP_SYN_RECV
        } else if *fin != [false; 2] {
            timeout::TCP_CLOSE_WAIT
        } else {
            timeout::TCP_ESTABLISHED
        }
    }

    pub fn is_expired(&self, now: u64) -> bool {
        now - self.last_seen > self.timeout()
    }

    /// Whether the endpoint may be in `TIME_WAIT`, or may have ignored the reset.
    pub fn is_in_time_wait(&self, now: u64) -> bool {
        let State { fin, rst, .. } = &self.state;
        let is_time_wait = self.proto == TCP && *fin == [true; 2] && *rst == [false; 2];
        (is_time_wait || self.state.is_reset_by_client()) && now - self.last_seen <= timeout::QUARANTINE
    }

    /// Whether the source port stays in quarantine after the flow has ended.
    pub fn is_quarantined(&self, now: u64) -> bool {
        self.kind.is_snat() && self.is_in_time_wait(now)
    }

    /// Whether one side has closed, and the flow was silent for a minute.
    pub fn is_abandoned(&self, now: u64) -> bool {
        self.state.fin != [false; 2] && now - self.last_seen > timeout::HALF_CLOSED
    }

    /// Whether a new flow may get the source port of this one, if there are no others.
    pub fn gives_up_port(&self, now: u64) -> bool {
        !self.state.assured || self.is_abandoned(now)
    }

    /// Whether a client's packet with these flags goes to the same endpoint as the packets before. `service`: the Service
    /// that a SYN is for.
    pub fn continues(&self, flags: u8, service: u32, scenario: &Scenario, now: u64) -> bool {
        let is_syn = self.proto != UDP && flags & (SYN | ACK) == SYN;
        let is_reset = self.state.is_reset_by_client();
        if is_syn && self.state.is_closed() && !is_reset {
            return false;
        }
        let is_answered = !self.state.has_unanswered_syn || now - self.last_seen <= timeout::SYN_ANSWER;
        if is_syn && self.state.assured && is_answered && !is_reset {
            return true;
        }
        if is_syn && self.service != service {
            return false;
        }
        let stays = self.proto != UDP && self.state.replied && !is_syn;
        self.kind.is_direct() || stays || self.is_served(scenario)
    }

    /// Whether the flow did not begin with the first packet of its connection.
    pub fn is_guess(&self) -> bool {
        self.proto == TCP && !self.state.has_syn
    }

    /// Whether a packet that was encapsulated so often does not follow this flow to another node again.
    pub fn has_returned(&self, hops: u8) -> bool {
        self.is_tunnel && (hops >= MAX_HOPS || self.is_guess() && hops > self.hops)
    }

    /// Whether the endpoint is still one of the Service.
    pub fn is_served(&self, scenario: &Scenario) -> bool {
        let service = scenario.services.iter().find(|service| service.id == self.service);
        service.is_some_and(|service| {
            let mut endpoints = service.endpoints.iter();
            endpoints.any(|e| e.id == self.backend_id && e.addr == self.backend && e.serves)
        })
    }
}
