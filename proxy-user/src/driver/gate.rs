//! What the driver knows about one pod, for pods that wait until nodes have programmed them (`ballast gate`).

use std::net::{IpAddr, SocketAddr};

use super::Driver;
use proxy_core::model::ServiceName;
use proxy_core::model::net::IpFamily;
use proxy_core::store::Store;

/// The state of a pod as an endpoint of a Service on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodState {
    /// An EndpointSlice of the Service has the pod, ready or not, and the newest known state of the Service is programmed. So the
    /// node follows the changes of the Service.
    pub is_known: bool,
    /// New connections may still get to the pod.
    pub is_selected: bool,
}

impl<S: Store> Driver<S> {
    /// Returns the state of the pod with these addresses. An address of a family that the Service does not have is left out.
    pub(super) fn pod(&self, name: &ServiceName, addresses: &[IpAddr]) -> PodState {
        let is_programmed = self.cluster.has_listed_all()
            && !self.changed.contains(name)
            && !self.reconciler.is_failing(name)
            && !self.reconciler.is_node_failing();
        let is_selected = |address: &IpAddr| {
            let ports = self.reconciler.plan(name).into_iter().flat_map(|plan| plan.ports.values());
            ports
                .flat_map(|port| port.backends.iter())
                .any(|(at, facts)| at.address == *address && (facts.in_cluster || facts.in_local))
        };
        let is_in_slice = |address: &IpAddr| {
            let mut endpoints = self.cluster.slices(name).flat_map(|slice| &slice.endpoints);
            endpoints.any(|endpoint| endpoint.address == *address)
        };
        let service = self.cluster.service(name).filter(|service| !service.is_foreign);
        let of_family = |address: &&IpAddr| {
            service.is_some_and(|service| service.families().any(|family| family == IpFamily::of(**address)))
        };
        let mut meant = addresses.iter().filter(of_family).peekable();
        let is_known = is_programmed && meant.peek().is_some() && meant.all(is_in_slice);
        PodState { is_known, is_selected: !is_programmed || addresses.iter().any(is_selected) }
    }

    /// Returns the endpoints of a Service that get new connections, each once.
    pub(super) fn endpoints(&self, name: &ServiceName) -> Vec<SocketAddr> {
        let ports = self.reconciler.plan(name).into_iter().flat_map(|plan| plan.ports.values());
        let mut all: Vec<_> = ports
            .flat_map(|port| port.backends.keys())
            .map(|at| SocketAddr::new(at.address, at.port))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}
