//! Fragments: the ports of the first one hold for the later ones.

use std::net::{IpAddr, SocketAddr};

use proxy_common::reason::Reason;

use super::Model;
use super::parse::{Header, Segment, header_at};
use super::rules::timeout;
use crate::forge::ETHERNET;
use crate::scenario::SCTP;

/// The identity of a fragmented packet; IPv6 does not use the protocol for it (RFC 8200, 4.5).
pub type Key = (IpAddr, IpAddr, u32, u8);

/// What the first fragment contained.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    src_port: u16,
    dst_port: u16,
    proto: u8,
    length: usize,
    seen: u64,
}

fn key_of(header: &Header) -> Key {
    (header.src, header.dst, header.id, if header.src.is_ipv4() { header.proto } else { 0 })
}

impl Model {
    /// Processes a first fragment: it has ports, and is treated like an unfragmented packet.
    pub(super) fn first_fragment(&mut self, input: &[u8], segment: Segment) -> Result<Segment, Reason> {
        if segment.proto == SCTP {
            return Err(Reason::Fragment);
        }
        let is_backend = self.is_backend(segment.src, segment.proto);
        if !self.is_frontend(segment.dst, segment.proto) && !is_backend {
            return Ok(segment);
        }
        self.note_first_fragment(input, segment)
    }

    /// The same for a first fragment that is for a Service, or from an endpoint.
    pub(super) fn note_first_fragment(&mut self, input: &[u8], segment: Segment) -> Result<Segment, Reason> {
        if segment.proto == SCTP {
            return Err(Reason::Fragment);
        }
        let header = header_at(input, ETHERNET).ok_or(Reason::Malformed)?;
        self.reach("a first fragment");
        let entry = Entry {
            src_port: segment.src.port(),
            dst_port: segment.dst.port(),
            proto: segment.proto,
            length: segment.length(),
            seen: self.now,
        };
        self.fragments.insert(key_of(&header), entry);
        Ok(segment)
    }

    /// Whether the first fragment of the same packet was seen.
    pub(super) fn has_first_fragment(&self, header: &Header) -> bool {
        self.fragments.contains_key(&key_of(header))
    }

    pub(super) fn is_backend(&self, src: SocketAddr, proto: u8) -> bool {
        let mut services = self.scenario.services.iter().filter(|service| service.proto == proto);
        services.any(|service| service.endpoints.iter().any(|endpoint| endpoint.addr == src))
    }

    /// Processes a later fragment; returns it as a segment with the ports of the first one.
    pub(super) fn later_fragment(&mut self, input: &[u8], header: Option<Header>) -> Result<Segment, Reason> {
        let header = header.ok_or(Reason::Malformed)?;
        let is_ours = self.scenario.is_in_range(header.dst) && self.scenario.unmanaged != Some(header.dst);
        let alone = if is_ours { Reason::FragmentWithoutFirst } else { Reason::Fragment };
        let entry = self.fragments.get(&key_of(&header)).ok_or(alone)?;
        if self.now - entry.seen > timeout::FRAGMENT {
            return Err(alone);
        }
        let segment = Segment {
            src: SocketAddr::new(header.src, entry.src_port),
            dst: SocketAddr::new(header.dst, entry.dst_port),
            proto: entry.proto,
            flags: 0,
            has_options: false,
            is_bare: false,
            seq: 0,
            ack: 0,
            l4: None,
            end: header.end.min(input.len().max(header.end)),
            is_first: false,
            longest: entry.length,
        };
        self.reach("a later fragment");
        Ok(segment)
    }
}
