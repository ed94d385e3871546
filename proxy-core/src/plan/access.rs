//! Which clients may use a load balancer's addresses (`spec.loadBalancerSourceRanges`).
//!
//! As in kube-proxy (`pkg/proxy/nftables/proxier.go`): only the ranges of a family apply to it; a range of every address
//! accepts every client; if this node's own address is in a range, the load balancer's addresses are accepted as sources
//! too, because a load balancer may send the node's own packets back to it with such a source.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::model::net::IpFamily;
use crate::model::{Problem, Service};

use super::Access;

/// The clients that may use the load balancer's addresses of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// The access of the frontends of these addresses.
    pub access: Access,
    /// The ranges to which [`Allowed::access`] refers, sorted.
    pub ranges: Arc<[IpNet]>,
    /// A problem if the operator may have intended something else.
    pub problem: Option<Problem>,
}

/// Returns the clients that may use the addresses of a family. `node` is this node's address in the family; its other
/// addresses do not count. `strict` closes a family for which the list has no range.
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
        // If the list accepts every address of the other family, this family is open, too, without a problem.
        if list.iter().any(is_every_address) {
            return Allowed::default();
        }
        if !strict {
            return Allowed { problem: Some(open(service, family)), ..Allowed::default() };
        }
    }
    let problem = list.is_empty().then(|| closed(service, family));
    let node = node.is_some_and(|address| ranges.iter().any(|range| range.contains(&address)));
    if node {
        ranges.extend(addresses.map(|address| IpNet::from(*address)));
    }
    Allowed { access: Access::Ranges { node }, ranges: ranges.into_iter().collect(), problem }
}

fn open(service: &Service, family: IpFamily) -> Problem {
    let message = format!(
        "the list has no {family} range, so every client may use the load balancer's {family} address, as with kube-proxy; add a \
         range, or set --source-ranges-strict"
    );
    problem(service, message)
}

/// kube-proxy admits every client then.
fn closed(service: &Service, family: IpFamily) -> Problem {
    let message = format!(
        "no entry of the list can be used, so no client may use the load balancer's {family} address; correct an entry"
    );
    problem(service, message)
}

fn problem(service: &Service, message: String) -> Problem {
    let object = format!("Service {}", service.name);
    Problem { object, field: "spec.loadBalancerSourceRanges".to_owned(), message }
}

#[cfg(test)]
mod tests;
