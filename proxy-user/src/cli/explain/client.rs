//! The rules about the client.

use std::net::IpAddr;

use proxy_common::Address;
use proxy_common::config::CONFIG_DETECT_LOCAL;
use proxy_common::decide;
use proxy_common::service::ServiceEntry;
use proxy_common::source_range::SourceRangeKey;

use super::choice::flags;
use super::walk::Walk;
use proxy_cli::question::Client;

impl<A: Address + Into<IpAddr>> Walk<'_, A> {
    pub(super) fn is_local_pod(&self, client: A) -> bool {
        self.is_pod
            || self.rules.backends.values().any(|backend| backend.addr == client && flags(backend.flags).0)
    }

    /// Whether the client is a process or a pod of this node, as far as it is known.
    pub(super) fn is_on_node(&self, client: Client, from: Option<A>) -> bool {
        self.is_pod || self.is_of_node(client, from) || from.is_some_and(|from| self.is_local_pod(from))
    }

    pub(super) fn is_of_node(&self, client: Client, from: Option<A>) -> bool {
        client == Client::Host || from.is_some_and(|from| self.rules.node_addrs.contains_key(&from))
    }

    /// Whether an agent attaches programs to the devices of pods.
    pub(super) fn is_attended(&self) -> bool {
        decide::is_attended(&self.rules.common.config, self.rules.common.now)
    }

    /// Whether the client is outside, as far as its address shows.
    pub(super) fn outside(&mut self, from: Option<A>) -> bool {
        let Some(from) = from else {
            self.step("client", "inside: a pod of this node");
            return false;
        };
        if self.is_local_pod(from) {
            self.step(
                "client",
                if self.is_pod {
                    "inside: a pod of this node"
                } else {
                    "inside: an endpoint on this node has this address"
                },
            );
            return false;
        }
        let by_address = self.rules.common.config.flags & CONFIG_DETECT_LOCAL != 0;
        let by_uplink = self.rules.common.has_uplink;
        let flags = self.rules.common.config.flags;
        let outside = decide::is_outside(by_uplink, flags, &self.rules.node, &from);
        self.step(
            "client",
            if outside && by_address {
                "outside: the address is in no pod range"
            } else if outside {
                "outside if its packets arrive on an uplink (NIC, tunnel); inside on any other device"
            } else if !by_uplink && !by_address {
                "inside: no device of this node is an uplink"
            } else {
                "inside: the address is in a pod range"
            },
        );
        outside
    }

    /// Returns the longest source range that contains the client.
    pub(super) fn range(&self, service: &ServiceEntry, client: &A) -> Option<(u32, SourceRangeKey<A>)> {
        let ranges = self.rules.ranges.iter().filter(|(_, range)| range.set == service.ranges);
        ranges
            .filter(|(bits, range)| begins_alike(client, &range.addr, *bits))
            .max_by_key(|(bits, _)| *bits)
            .copied()
    }
}

fn begins_alike<A: Address>(a: &A, b: &A, bits: u32) -> bool {
    let wide = |addr: &A| {
        addr.words().into_iter().fold(0u128, |sum, word| sum << 32 | u128::from(u32::from_be(word)))
    };
    let different = (wide(a) ^ wide(b)).leading_zeros();
    different >= bits
}
