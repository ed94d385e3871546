//! Which clients may use a load balancer's addresses (`spec.loadBalancerSourceRanges`).
//!
//! As kube-proxy (`pkg/proxy/nftables/proxier.go`): each family has the ranges of the list that are of it, a range
//! of every address admits every client, and where this node's own address is in a range, the addresses themselves are too,
//! because load balancers may send a node's own packets back to it under them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::net::IpFamily;
use crate::model::{Problem, Service};

use super::Access;

/// Who may use the load balancer's addresses of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// What their frontends say.
    pub access: Access,
    /// The ranges that it refers to.
    pub ranges: BTreeSet<IpNet>,
    /// What the operator may not have meant.
    pub problem: Option<Problem>,
}

/// Who may. `node` is this node's address in the family, and none of its others; `strict` closes a family that the list says nothing about.
pub fn allowed(service: &Service, family: IpFamily, strict: bool, node: Option<IpAddr>) -> Allowed {
    let Some(list) = &service.source_ranges else { return Allowed::default() };
    let mut addresses = service.load_balancer_ips.iter().filter(|ip| IpFamily::of(**ip) == family).peekable();
    if addresses.peek().is_none() {
        return Allowed::default();
    }
    let mut ranges: BTreeSet<IpNet> =
        list.iter().filter(|range| IpFamily::of(range.addr()) == family).copied().collect();
    let is_every_address = |range: &IpNet| range.prefix_len() == 0;
    if ranges.iter().any(is_every_address) {
        return Allowed::default();
    }
    if ranges.is_empty() && !list.is_empty() {
        // A list that lets all of one family in keeps the other one out on purpose.
        if list.iter().any(is_every_address) {
            return Allowed::default();
        }
        if !strict {
            return Allowed { problem: Some(open(service, family)), ..Allowed::default() };
        }
    }
    let node = node.is_some_and(|address| ranges.iter().any(|range| range.contains(&address)));
    if node {
        ranges.extend(addresses.map(|address| IpNet::from(*address)));
    }
    Allowed { access: Access::Ranges { node }, ranges, problem: None }
}

fn open(service: &Service, family: IpFamily) -> Problem {
    Problem {
        object: format!("Service {}", service.name),
        field: "spec.loadBalancerSourceRanges".to_owned(),
        message: format!(
            "the list has no {family} range, so every client may use the load balancer's {family} address, as with \
             kube-proxy; add a range, or set --source-ranges-strict"
        ),
    }
}

#[cfg(test)]
mod tests;
