//! What open connections still need: bits of the prefilter, source ports, and ids of backends and of Service ports.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use proxy_common::config::{PortRange, SNAT_RANGES};

/// A bit of the prefilter: the number of its word, and its mask.
pub type FilterBit = (u32, u64);

/// Which flows with a source for SNAT end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// All: the node does not have the address any more, so no reply arrives.
    All,
    /// Those of UDP, whose next packet begins another flow: the device of the address was switched off.
    Udp,
}

/// Access to the open connections.
pub trait FlowUse {
    /// Returns those of these backends that still count open connections.
    fn connected(&mut self, backends: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>>;

    /// Returns those of `bits` that a flow needs which has not expired: the bit of its frontend, for the client's packets,
    /// or the bit of its endpoint, for the replies. Reads each flow once.
    fn used_among(&mut self, bits: &BTreeSet<FilterBit>) -> io::Result<BTreeSet<FilterBit>>;

    /// Returns those of these ids of Service ports that a flow has which has not expired. Reads each flow once.
    fn services_among(&mut self, ids: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>>;

    /// Whether a flow with SNAT that has not expired has a source port in none of these ranges. Reads each flow once.
    fn has_snat_outside(&mut self, ranges: [PortRange; SNAT_RANGES]) -> io::Result<bool>;

    /// Removes flows with SNAT whose source is one of these addresses, and returns their number. Reads each flow once.
    fn end_sources(&mut self, addresses: &BTreeMap<IpAddr, Ends>) -> io::Result<usize>;

    /// Whether a flow that has not expired is encapsulated (DSR). Reads each flow once.
    fn has_dsr(&mut self) -> io::Result<bool>;
}

/// A [`FlowUse`] without any connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFlows;

impl FlowUse for NoFlows {
    fn connected(&mut self, _: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        Ok(BTreeSet::new())
    }

    fn used_among(&mut self, _: &BTreeSet<FilterBit>) -> io::Result<BTreeSet<FilterBit>> {
        Ok(BTreeSet::new())
    }

    fn services_among(&mut self, _: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        Ok(BTreeSet::new())
    }

    fn has_snat_outside(&mut self, _: [PortRange; SNAT_RANGES]) -> io::Result<bool> {
        Ok(false)
    }

    fn end_sources(&mut self, _: &BTreeMap<IpAddr, Ends>) -> io::Result<usize> {
        Ok(0)
    }

    fn has_dsr(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}
