//! What all events so far add up to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    EndpointSlice, Event, HostView, Key, Kind, Listing, NodeView, Object, Service, ServiceName, SliceName,
};

/// The Services and the EndpointSlices of the cluster, and this node.
///
/// Events of different objects may come in any order: the state is the same in the end.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    node: NodeView,
    /// The cluster has said that it does not know this node.
    node_is_unknown: bool,
    services: BTreeMap<ServiceName, Service>,
    /// By the Service they belong to, which need not exist (yet).
    slices: BTreeMap<ServiceName, BTreeMap<SliceName, EndpointSlice>>,
    /// The Service that each slice is filed under.
    owners: BTreeMap<SliceName, ServiceName>,
    listed: BTreeSet<Kind>,
    service_cidrs: BTreeMap<String, Vec<IpNet>>,
    /// `None` until the host has been looked at.
    host: Option<HostView>,
}

impl Cluster {
    /// An empty cluster, seen from `node`. A zone that `node` has holds until an event says otherwise.
    pub fn new(node: NodeView) -> Self {
        Self { node, ..Self::default() }
    }

    /// Takes one event in. Returns the Services that need planning again; those it removed are among them.
    pub fn apply(&mut self, event: Event) -> BTreeSet<ServiceName> {
        let mut changed = BTreeSet::new();
        match event {
            Event::Apply(Object::Service(service)) => self.put_service(service, &mut changed),
            Event::Apply(Object::Slice(slice)) => self.put_slice(slice, &mut changed),
            Event::Apply(Object::Node(node)) => self.set_node(Some(node), &mut changed),
            Event::Apply(Object::ServiceCidr(cidr)) => {
                self.service_cidrs.insert(cidr.name, cidr.ranges);
            }
            Event::Delete(Key::ServiceCidr(name)) => {
                self.service_cidrs.remove(&name);
            }
            Event::Delete(Key::Service(name)) => self.remove_service(&name, &mut changed),
            Event::Delete(Key::Slice(name)) => self.remove_slice(&name, &mut changed),
            Event::Delete(Key::Node(name)) => {
                if name == self.node.name {
                    self.set_node(None, &mut changed);
                }
            }
            Event::Reset(listing) => self.reset(listing, &mut changed),
            Event::Host(host) => self.set_host(host, &mut changed),
        }
        changed
    }

    /// Whether Services and EndpointSlices have been listed once: before that, nothing may be deleted. The
    /// node is not waited for: its zone only says which endpoints are better than others.
    pub fn has_listed_all(&self) -> bool {
        self.listed.contains(&Kind::Service) && self.listed.contains(&Kind::Slice)
    }

    /// This node.
    pub const fn node(&self) -> &NodeView {
        &self.node
    }

    /// Whether traffic may be sent to this node: it neither leaves nor is gone. So it is as long as nobody has said
    /// anything about it.
    pub const fn is_node_eligible(&self) -> bool {
        !self.node_is_unknown && !self.node.leaves
    }

    /// The ranges of all `ServiceCIDR`s.
    pub fn service_cidrs(&self) -> BTreeSet<IpNet> {
        self.service_cidrs.values().flatten().copied().collect()
    }

    /// The machine, when it has been looked at.
    pub const fn host(&self) -> Option<&HostView> {
        self.host.as_ref()
    }

    /// The machine's addresses that others may know; none before it has been looked at.
    pub fn host_addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.host.iter().flat_map(HostView::addresses)
    }

    /// A Service.
    pub fn service(&self, name: &ServiceName) -> Option<&Service> {
        self.services.get(name)
    }

    /// All Services, by name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// The slices of a Service, by name.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> {
        self.slices.get(service).into_iter().flat_map(BTreeMap::values)
    }

    /// A slice, whichever Service it belongs to.
    pub fn slice(&self, name: &SliceName) -> Option<&EndpointSlice> {
        self.slices.get(self.owners.get(name)?)?.get(name)
    }

    fn put_service(&mut self, service: Service, changed: &mut BTreeSet<ServiceName>) {
        if self.services.get(&service.name) != Some(&service) {
            changed.insert(service.name.clone());
            self.services.insert(service.name.clone(), service);
        }
    }

    fn remove_service(&mut self, name: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        if let Some((name, _)) = self.services.remove_entry(name) {
            changed.insert(name);
        }
    }

    fn put_slice(&mut self, slice: EndpointSlice, changed: &mut BTreeSet<ServiceName>) {
        match self.owners.get(&slice.name) {
            Some(owner) if *owner == slice.service => {
                let known = self.slices.get(owner).and_then(|slices| slices.get(&slice.name));
                if known.is_some_and(|known| known.says_the_same(&slice)) {
                    return;
                }
            }
            // Its label has changed: it leaves one Service and joins another.
            Some(_) => self.remove_slice(&slice.name.clone(), changed),
            None => {}
        }
        self.touch(&slice.service, changed);
        self.owners.insert(slice.name.clone(), slice.service.clone());
        self.slices.entry(slice.service.clone()).or_default().insert(slice.name.clone(), slice);
    }

    fn remove_slice(&mut self, name: &SliceName, changed: &mut BTreeSet<ServiceName>) {
        let Some(owner) = self.owners.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&owner) {
            slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(&owner);
            }
        }
        self.touch(&owner, changed);
    }

    /// A slice whose Service is not here changes nothing: the Service will be planned when it comes.
    fn touch(&self, service: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        if self.services.contains_key(service) {
            changed.insert(service.clone());
        }
    }

    /// Anything but the name can change: which node we are was decided at start.
    fn set_node(&mut self, node: Option<NodeView>, changed: &mut BTreeSet<ServiceName>) {
        if node.as_ref().is_some_and(|node| node.name != self.node.name) {
            return;
        }
        self.node_is_unknown = node.is_none();
        let node = node.unwrap_or_else(|| NodeView::new(self.node.name.clone()));
        let old = std::mem::replace(&mut self.node, node);
        if old.pod_cidrs != self.node.pod_cidrs {
            changed.extend(self.services.keys().cloned());
        }
        if old.zone == self.node.zone {
            return;
        }
        for (service, slices) in &self.slices {
            if slices.values().any(EndpointSlice::has_hints) {
                self.touch(service, changed);
            }
        }
    }

    /// Services with source ranges care whether this node is in one of them, and others whether their address is
    /// the node's.
    fn set_host(&mut self, host: HostView, changed: &mut BTreeSet<ServiceName>) {
        let known: BTreeSet<IpAddr> = self.host_addresses().copied().collect();
        self.host = Some(host);
        let now: BTreeSet<IpAddr> = self.host_addresses().copied().collect();
        if now != known {
            let cares = |service: &&Service| {
                let differs = |address: &IpAddr| known.contains(address) != now.contains(address);
                service.source_ranges.is_some() || service.cluster_ips.iter().any(differs)
            };
            changed.extend(self.services.values().filter(cares).map(|service| service.name.clone()));
        }
    }

    fn reset(&mut self, listing: Listing, changed: &mut BTreeSet<ServiceName>) {
        self.listed.insert(listing.kind());
        match listing {
            Listing::Services(services) => {
                let live: BTreeSet<ServiceName> = services.iter().map(|s| s.name.clone()).collect();
                let gone: Vec<_> =
                    self.services.keys().filter(|name| !live.contains(name)).cloned().collect();
                for name in gone {
                    self.remove_service(&name, changed);
                }
                for service in services {
                    self.put_service(service, changed);
                }
            }
            Listing::Slices(slices) => {
                let live: BTreeSet<SliceName> = slices.iter().map(|s| s.name.clone()).collect();
                let gone: Vec<_> = self.owners.keys().filter(|name| !live.contains(name)).cloned().collect();
                for name in gone {
                    self.remove_slice(&name, changed);
                }
                for slice in slices {
                    self.put_slice(slice, changed);
                }
            }
            Listing::Node(node) => self.set_node(node, changed),
            Listing::ServiceCidrs(cidrs) => {
                self.service_cidrs = cidrs.into_iter().map(|cidr| (cidr.name, cidr.ranges)).collect();
            }
        }
    }
}

#[cfg(test)]
mod tests;
