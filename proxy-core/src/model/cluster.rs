//! The state of the cluster after all events so far.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;

use ipnet::IpNet;

use super::net::IpFamily;
use super::{
    EndpointSlice, Event, HostView, Key, Listing, NodeView, Object, ObjectKind, Service, ServiceName,
    SliceName, SortedMap, pack,
};

mod leftovers;
mod reported;
mod statics;

/// The Services and the EndpointSlices of the cluster, and this node.
///
/// The final state does not depend on the order in which events of different objects arrive.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    node: NodeView,
    /// The API server has reported that this node has no Node object.
    node_is_unknown: bool,
    /// The zone is that of an earlier Node object of this node.
    zone_is_kept: bool,
    /// Boxed, because half of a tree's places are empty.
    services: BTreeMap<ServiceName, Box<Service>>,
    /// The slices by their Service, which may not exist (yet).
    slices: BTreeMap<ServiceName, SortedMap<SliceName, EndpointSlice>>,
    /// The Service under which each slice is stored.
    owners: BTreeMap<SliceName, ServiceName>,
    listed: BTreeSet<ObjectKind>,
    service_cidrs: BTreeMap<String, Vec<IpNet>>,
    /// The internal addresses of the other nodes, by name; `None` until they have been listed.
    others: Option<BTreeMap<String, Vec<IpAddr>>>,
    /// The host as the kernel describes it, if a device may hold addresses that another proxy has left.
    seen: Option<HostView>,
    /// `None` until the first [`Event::Host`]. Without the addresses that another proxy has left.
    host: Option<HostView>,
    /// The host's addresses, without loopback addresses.
    own: BTreeSet<IpAddr>,
    statics: Statics,
}

/// The names of the folder's objects, and the API server's objects that they hide.
#[derive(Clone, Debug, Default)]
struct Statics {
    services: BTreeSet<ServiceName>,
    slices: BTreeSet<SliceName>,
    hidden: BTreeMap<ServiceName, Service>,
    hidden_slices: BTreeMap<SliceName, EndpointSlice>,
}

impl Statics {
    fn hides(&self, slice: &EndpointSlice) -> bool {
        self.slices.contains(&slice.name) || self.services.contains(&slice.service)
    }
}

impl Cluster {
    /// Returns an empty cluster, in which `node` is this node. A zone of `node` applies until an event changes it.
    pub fn new(node: NodeView) -> Self {
        Self { node, ..Self::default() }
    }

    /// Applies one event. Returns the Services that have to be planned again, including removed ones.
    pub fn apply(&mut self, event: Event) -> BTreeSet<ServiceName> {
        let mut changed = BTreeSet::new();
        // Only Services tell which addresses another proxy has left.
        let has_services = matches!(
            event,
            Event::Apply(Object::Service(_))
                | Event::Delete(Key::Service(_))
                | Event::Reset(Listing::Services(_))
                | Event::Static { .. }
        );
        let families = self.tunnel_families();
        match event {
            Event::Apply(Object::Service(service)) => self.offer_service(service, &mut changed),
            Event::Apply(Object::Slice(slice)) => self.offer_slice(slice, &mut changed),
            Event::Apply(Object::Node(node)) if node.name != self.node.name => {
                self.set_other(&node.name.clone(), Some(node), &mut changed);
            }
            Event::Apply(Object::Node(node)) => self.set_node(Some(node), &mut changed),
            Event::Apply(Object::ServiceCidr(cidr)) => {
                self.service_cidrs.insert(cidr.name, cidr.ranges);
            }
            Event::Delete(Key::ServiceCidr(name)) => {
                self.service_cidrs.remove(&name);
            }
            Event::Delete(Key::Service(name)) => self.withdraw_service(&name, &mut changed),
            Event::Delete(Key::Slice(name)) => self.withdraw_slice(&name, &mut changed),
            Event::Delete(Key::Node(name)) => {
                if name == self.node.name {
                    self.set_node(None, &mut changed);
                } else {
                    self.set_other(&name, None, &mut changed);
                }
            }
            Event::Reset(listing) => self.reset(listing, &mut changed),
            Event::Static { services, slices } => self.set_statics(services, slices, &mut changed),
            Event::Host(host) => self.set_seen(host, &mut changed),
        }
        if has_services && !changed.is_empty() {
            self.find_leftovers(&mut changed);
        }
        if self.tunnel_families() != families {
            changed.extend(self.services.keys().cloned());
        }
        changed
    }

    /// Whether an event with this node would change nothing, as with nearly all of its heartbeats.
    pub fn is_heartbeat(&self, node: &NodeView) -> bool {
        if node.name == self.node.name {
            return !self.node_is_unknown && self.completed(node.clone()) == self.node;
        }
        self.others.as_ref().is_none_or(|others| others.get(&node.name) == Some(&node.internal_ips))
    }

    /// Whether Services and EndpointSlices have been listed once: before that, nothing may be deleted. A cluster may have no
    /// object of this node.
    pub fn has_listed_all(&self) -> bool {
        self.listed.contains(&ObjectKind::Service) && self.listed.contains(&ObjectKind::Slice)
    }

    /// Returns this node.
    pub const fn node(&self) -> &NodeView {
        &self.node
    }

    /// Returns the internal addresses of this node's Node object that the host really has.
    pub fn own_internal_ips(&self) -> impl Iterator<Item = IpAddr> {
        let listed = self.others.as_ref().and_then(|nodes| nodes.get(&self.node.name));
        let known = if self.node.internal_ips.is_empty() { listed } else { Some(&self.node.internal_ips) };
        known.into_iter().flatten().copied().filter(|address| self.is_own(address))
    }

    /// Returns the families in which this node can encapsulate packets to listed nodes (DSR).
    fn tunnel_families(&self) -> BTreeSet<IpFamily> {
        let own = self.others.as_ref().map(|_| self.own_internal_ips());
        own.into_iter().flatten().map(IpFamily::of).collect()
    }

    /// Returns the internal addresses of the other nodes, by name; this node may be among them. `None` if the nodes have
    /// not been listed: the addresses are not needed, or the list has not arrived yet.
    pub const fn others(&self) -> Option<&BTreeMap<String, Vec<IpAddr>>> {
        self.others.as_ref()
    }

    /// Whether traffic may be sent to this node: its Node object exists, and the node is not leaving. True until that
    /// object is known.
    pub const fn is_node_eligible(&self) -> bool {
        !self.node_is_unknown && !self.node.is_leaving
    }

    /// Returns the ranges of all `ServiceCIDR`s.
    pub fn service_cidrs(&self) -> BTreeSet<IpNet> {
        self.service_cidrs.values().flatten().copied().collect()
    }

    /// Returns the host; `None` before the first [`Event::Host`].
    pub const fn host(&self) -> Option<&HostView> {
        self.host.as_ref()
    }

    /// Whether the host has the address, and it is no loopback address; false before the first [`Event::Host`].
    pub fn is_own(&self, address: &IpAddr) -> bool {
        self.own.contains(address)
    }

    /// Returns the cluster addresses of Services that the host has itself (for example with `NodeLocal` `DNSCache`).
    pub fn own_cluster_ips(&self) -> BTreeSet<IpAddr> {
        let all = self.services.values().flat_map(|service| &service.cluster_ips);
        all.filter(|address| self.is_own(address)).copied().collect()
    }

    /// Returns the Service of that name.
    pub fn service(&self, name: &ServiceName) -> Option<&Service> {
        self.services.get(name).map(|service| &**service)
    }

    /// Returns all Services, by name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values().map(|service| &**service)
    }

    /// Returns the Services after this one in the order of names; all of them if `name` is `None`.
    pub fn services_after(&self, name: Option<&ServiceName>) -> impl Iterator<Item = &Service> {
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        self.services.range((from, Bound::Unbounded)).map(|(_, service)| &**service)
    }

    /// Returns the slices of a Service, by name.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> {
        self.slices.get(service).into_iter().flat_map(SortedMap::values)
    }

    /// Returns the slice of that name, of any Service.
    pub fn slice(&self, name: &SliceName) -> Option<&EndpointSlice> {
        self.slices.get(self.owners.get(name)?)?.get(name)
    }

    fn put_service(&mut self, service: Service, changed: &mut BTreeSet<ServiceName>) {
        if let Some(known) = self.services.get_mut(&service.name).filter(|known| ***known == service) {
            known.version = service.version;
            return;
        }
        changed.insert(service.name.clone());
        self.services.insert(service.name.clone(), Box::new(service));
    }

    fn remove_service(&mut self, name: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        if let Some((name, _)) = self.services.remove_entry(name) {
            changed.insert(name);
        }
    }

    fn put_slice(&mut self, slice: EndpointSlice, changed: &mut BTreeSet<ServiceName>) {
        match self.owners.get(&slice.name) {
            Some(owner) if *owner == slice.service => {
                let known = self.slices.get_mut(owner).and_then(|slices| slices.get_mut(&slice.name));
                if let Some(known) = known.filter(|known| known.has_same_content(&slice)) {
                    known.version = slice.version;
                    return;
                }
            }
            // The label of the slice has changed: the slice moves from one Service to another.
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

    /// Marks the Service as changed if it exists. A Service that does not exist yet is planned when it arrives.
    fn touch(&self, service: &ServiceName, changed: &mut BTreeSet<ServiceName>) {
        if self.services.contains_key(service) {
            changed.insert(service.clone());
        }
    }

    /// Replaces this node's object; `None`: it is gone. Its addresses, ranges and zone then stay as they were, because the
    /// machine has them still: kube-proxy leaves its rules, too. The name cannot change, because the agent's node is determined
    /// at start.
    fn set_node(&mut self, node: Option<NodeView>, changed: &mut BTreeSet<ServiceName>) {
        if node.as_ref().is_some_and(|node| node.name != self.node.name) {
            return;
        }
        self.node_is_unknown = node.is_none();
        self.zone_is_kept |= node.is_none();
        let Some(node) = node else { return };
        self.zone_is_kept &= node.zone.is_none();
        let node = self.completed(node);
        let old = std::mem::replace(&mut self.node, node);
        if old.pod_cidrs != self.node.pod_cidrs {
            changed.extend(self.services.keys().cloned());
        }
        if !old.addresses().eq(self.node.addresses()) {
            changed.extend(self.restricted());
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

    /// Returns this node's object with what an earlier one had, if a new one lacks it: the kubelet and other controllers set
    /// ranges, addresses and the zone after the object was created. A node does not lose all its addresses or its ranges, but
    /// it may lose the label of its zone.
    fn completed(&self, mut node: NodeView) -> NodeView {
        if node.pod_cidrs.is_empty() {
            node.pod_cidrs.clone_from(&self.node.pod_cidrs);
        }
        if node.addresses().next().is_none() {
            node.internal_ips.clone_from(&self.node.internal_ips);
            node.external_ips.clone_from(&self.node.external_ips);
        }
        if self.zone_is_kept && node.zone.is_none() {
            node.zone.clone_from(&self.node.zone);
        }
        node
    }

    /// Forgets the other nodes, which are not watched any more.
    pub fn forget_others(&mut self) {
        self.others = None;
    }

    /// Stores another node, or removes it if `node` is `None`.
    fn set_other(&mut self, name: &str, node: Option<NodeView>, changed: &mut BTreeSet<ServiceName>) {
        // Before the list has arrived, the map would hold this node only.
        let Some(others) = &mut self.others else { return };
        let old = others.remove(name);
        let new = node.map(|node| node.internal_ips);
        let is_same = old == new;
        others.extend(new.map(|ips| (name.to_owned(), ips)));
        if !is_same {
            self.touch_endpoints_on(|node| node == name, changed);
        }
    }

    /// Marks the Services with an endpoint on one of these nodes as changed.
    fn touch_endpoints_on(&self, is_meant: impl Fn(&str) -> bool, changed: &mut BTreeSet<ServiceName>) {
        for (service, slices) in &self.slices {
            let mut endpoints = slices.values().flat_map(|slice| &slice.endpoints);
            if endpoints.any(|endpoint| endpoint.node.as_deref().is_some_and(&is_meant)) {
                self.touch(service, changed);
            }
        }
    }

    /// Stores the host. Services with source ranges depend on whether this node is in one of them; other Services depend on
    /// whether their cluster address, or the address of an endpoint, is one of the host's.
    fn set_host(&mut self, host: HostView, changed: &mut BTreeSet<ServiceName>) {
        let now: BTreeSet<IpAddr> = host.addresses().copied().collect();
        let known = std::mem::replace(&mut self.own, now);
        let routes = self.host.as_ref().map(|host| &host.defaults);
        if known != self.own || routes != Some(&host.defaults) {
            changed.extend(self.restricted());
        }
        self.host = Some(host);
        let differing: BTreeSet<&IpAddr> = known.symmetric_difference(&self.own).collect();
        if differing.is_empty() {
            return;
        }
        let cares = |service: &&Service| service.cluster_ips.iter().any(|ip| differing.contains(ip));
        changed.extend(
            self.services.values().map(AsRef::as_ref).filter(cares).map(|service| service.name.clone()),
        );
        for (service, slices) in &self.slices {
            let mut endpoints = slices.values().flat_map(|slice| &slice.endpoints);
            if endpoints.any(|endpoint| differing.contains(&endpoint.address)) {
                self.touch(service, changed);
            }
        }
    }

    /// Returns the names of the Services with source ranges.
    fn restricted(&self) -> impl Iterator<Item = ServiceName> {
        self.services
            .values()
            .filter(|service| service.source_ranges.is_some())
            .map(|service| service.name.clone())
    }

    fn reset(&mut self, listing: Listing, changed: &mut BTreeSet<ServiceName>) {
        self.listed.insert(listing.kind());
        match listing {
            Listing::Services(services) => {
                let live: BTreeSet<ServiceName> = services.iter().map(|s| s.name.clone()).collect();
                let gone: Vec<_> =
                    self.services.keys().filter(|name| !live.contains(name)).cloned().collect();
                for name in gone {
                    self.withdraw_service(&name, changed);
                }
                for service in services {
                    self.offer_service(service, changed);
                }
                pack(&mut self.services);
            }
            Listing::Slices(slices) => {
                let live: BTreeSet<SliceName> = slices.iter().map(|s| s.name.clone()).collect();
                let known = self.owners.keys().chain(self.statics.hidden_slices.keys());
                let gone: Vec<_> = known.filter(|name| !live.contains(name)).cloned().collect();
                for name in gone {
                    self.withdraw_slice(&name, changed);
                }
                for slice in slices {
                    self.offer_slice(slice, changed);
                }
                pack(&mut self.slices);
                pack(&mut self.owners);
            }
            Listing::Node(node) => self.set_node(node, changed),
            Listing::Others(nodes) => {
                let now: BTreeMap<_, _> =
                    nodes.into_iter().map(|node| (node.name, node.internal_ips)).collect();
                let old = self.others.replace(now.clone()).unwrap_or_default();
                self.touch_endpoints_on(|node| old.get(node) != now.get(node), changed);
            }
            Listing::ServiceCidrs(cidrs) => {
                self.service_cidrs = cidrs.into_iter().map(|cidr| (cidr.name, cidr.ranges)).collect();
            }
        }
    }
}

#[cfg(test)]
mod tests;
