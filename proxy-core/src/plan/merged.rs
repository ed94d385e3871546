//! The endpoints of one Service port in one family, from all slices of the Service.

use crate::model::net::{IpFamily, Protocol};
use crate::model::{Endpoint, EndpointSlice, SortedMap};

use super::BackendAddress;

/// Endpoints by address and port, each once.
pub type MergedEndpoints<'a> = SortedMap<BackendAddress, &'a Endpoint>;

/// Merges the endpoints that serve the port with the name `name`. A named target port may have different numbers in
/// different slices.
///
/// An address and port that several slices contain is one endpoint. An endpoint that is not terminating takes precedence,
/// because its address has been given to a new pod (`pkg/proxy/endpointslicecache.go`); then one that is ready; then, only
/// to make the result independent of the order, one that serves, is on `node`, and sorts last.
pub fn merge<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    name: &str,
    protocol: Protocol,
    family: IpFamily,
    node: &str,
) -> MergedEndpoints<'a> {
    let rank = |e: &'a Endpoint| (!e.terminating, e.ready, e.serving, is_local(e, node), e);
    let mut all = Vec::new();
    for slice in slices.filter(|slice| slice.family == family) {
        for port in slice.ports.iter().filter(|port| port.name == name && port.protocol == protocol) {
            let key = |endpoint: &Endpoint| BackendAddress { address: endpoint.address, port: port.port };
            all.extend(slice.endpoints.iter().map(|endpoint| (key(endpoint), endpoint)));
        }
    }
    // If several endpoints have the same key, the map keeps the last one.
    all.sort_unstable_by(|(a, one), (b, other)| a.cmp(b).then_with(|| rank(one).cmp(&rank(other))));
    all.into_iter().collect()
}

/// Whether the endpoint runs on the node of that name.
pub fn is_local(endpoint: &Endpoint, node: &str) -> bool {
    endpoint.node.as_deref().is_some_and(|name| name == node)
}

#[cfg(test)]
mod tests;
