//! What open connections still need, for the layer above.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use proxy_common::PROTO_UDP;
use proxy_common::config::{PortRange, SNAT_RANGES};
use proxy_core::store::{Ends, FilterBit, FlowUse};

use super::{FlowRow, Forwarding, View};

impl FlowUse for View {
    fn connected(&mut self, backends: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        let open = self.open_connections(backends.iter().copied()).map_err(io::Error::other)?;
        Ok(open.into_iter().filter(|(_, count)| *count > 0).map(|(id, _)| id).collect())
    }

    fn used_among(&mut self, bits: &BTreeSet<FilterBit>) -> io::Result<BTreeSet<FilterBit>> {
        self.filter_bits(bits).map_err(io::Error::other)
    }

    fn services_among(&mut self, ids: &BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        self.flow_services(ids).map_err(io::Error::other)
    }

    fn has_snat_outside(&mut self, ranges: [PortRange; SNAT_RANGES]) -> io::Result<bool> {
        View::has_snat_outside(self, ranges).map_err(io::Error::other)
    }

    fn end_sources(&mut self, addresses: &BTreeMap<IpAddr, Ends>) -> io::Result<usize> {
        let ends = |flow: &FlowRow| match addresses.get(&flow.source.ip()) {
            Some(Ends::All) => flow.forwarding == Forwarding::Snat,
            Some(Ends::Udp) => flow.forwarding == Forwarding::Snat && flow.protocol.0 == PROTO_UDP,
            None => false,
        };
        self.delete_flows(ends).map(|removed| removed.len()).map_err(io::Error::other)
    }

    fn has_dsr(&mut self) -> io::Result<bool> {
        View::has_dsr(self).map_err(io::Error::other)
    }
}
