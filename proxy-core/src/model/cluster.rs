//! The state of the cluster after all events so far.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;

use ipnet::IpNet;

use super::net::IpFamily;
use super::{
    EndpointSlice, Event, HostView, Key, Listing, NodeView, Object, ObjectKind, Service, ServiceName,
    SliceName, SortedMap,
};
use layer::{Layer, conflict};

mod layer;
mod leftovers;

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
    /// The objects that the API server has reported.
    reported: Layer,
    /// The objects of the folder of static Services; they hide those of the API server.
    folder: Layer,
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
}

impl Cluster {
    /// Returns an empty cluster, in which `node` is this node. A zone of `node` applies until an event changes it.
    pub fn new(node: NodeView) -> Self {
        Self { node, ..Self::default() }
    }

    /// Applies one event. Returns the Services that have to be planned again, including removed ones.
    pub fn apply(&mut self, event: Event) -> BTreeSet<ServiceName> {
        let mut changed = BTreeSet::new();
        // Services whose slices differ. A Service that does not exist yet is planned when it arrives.
        let mut touched = BTreeSet::new();
        // Only Services tell which addresses another proxy has left.
        let has_services = matches!(
            event,
            Event::Apply(Object::Service(_))
                | Event::Delete(Key::Service(_))
                | Event::Reset(Listing::Services(_))
                | Event::Static { .. }
        );
        if let Event::Reset(listing) = &event {
            self.listed.insert(listing.kind());
        }
        let families = self.tunnel_families();
        match event {
            Event::Apply(Object::Service(service)) => self.reported.put_service(service, &mut changed),
            Event::Apply(Object::Slice(slice)) => self.reported.put_slice(slice, &mut touched),
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
            Event::Delete(Key::Service(name)) => self.reported.remove_service(&name, &mut changed),
            Event::Delete(Key::Slice(name)) => self.reported.remove_slice(&name, &mut touched),
            Event::Delete(Key::Node(name)) => {
                if name == self.node.name {
                    self.set_node(None, &mut changed);
                } else {
                    self.set_other(&name, None, &mut changed);
                }
            }
            Event::Reset(Listing::Services(services)) => {
                self.reported.reset_services(services, &mut changed);
            }
            Event::Reset(Listing::Slices(slices)) => self.reported.reset_slices(slices, &mut touched),
            Event::Reset(Listing::Node(node)) => self.set_node(node, &mut changed),
            Event::Reset(Listing::Others(nodes)) => {
                let now: BTreeMap<_, _> =
                    nodes.into_iter().map(|node| (node.name.clone(), node.tunnel_ips().to_vec())).collect();
                let old = self.others.replace(now.clone()).unwrap_or_default();
                changed.extend(self.with_endpoint_on(|node| old.get(node) != now.get(node)));
            }
            Event::Reset(Listing::ServiceCidrs(cidrs)) => {
                self.service_cidrs = cidrs.into_iter().map(|cidr| (cidr.name, cidr.ranges)).collect();
            }
            Event::Static { services, slices } => {
                // The API server's slices of these names appear or disappear.
                let names = self.folder.owners.keys().chain(slices.iter().map(|slice| &slice.name));
                touched.extend(names.filter_map(|name| self.reported.owners.get(name)).cloned());
                self.folder.reset_services(services, &mut changed);
                self.folder.reset_slices(slices, &mut touched);
            }
            Event::Host(host) => self.set_seen(host, &mut changed),
        }
        touched.retain(|name| self.service(name).is_some());
        changed.append(&mut touched);
        self.note_conflicts(&changed);
        if has_services && !changed.is_empty() {
            self.find_leftovers(&mut changed);
        }
        if self.tunnel_families() != families {
            changed.extend(self.services().map(|service| service.name.clone()));
        }
        changed
    }

    /// Whether an event with this node would change nothing, as with nearly all of its heartbeats.
    pub fn is_heartbeat(&self, node: &NodeView) -> bool {
        if node.name == self.node.name {
            return !self.node_is_unknown && self.completed(node.clone()) == self.node;
        }
        self.others
            .as_ref()
            .is_none_or(|others| others.get(&node.name).is_some_and(|known| known == node.tunnel_ips()))
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

    /// Returns the addresses of the other nodes to which packets may be encapsulated, by name; this node may be among them. `None` if the nodes have
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
        let all = self.services().flat_map(|service| &service.cluster_ips);
        all.filter(|address| self.is_own(address)).copied().collect()
    }

    /// Returns the names of the folder's Services.
    pub fn static_services(&self) -> impl Iterator<Item = &ServiceName> {
        self.folder.services.keys()
    }

    /// Whether the folder has a Service of that name.
    pub fn is_static(&self, name: &ServiceName) -> bool {
        self.folder.services.contains_key(name)
    }

    /// Returns the names of all Services and EndpointSlices that the API server has reported.
    pub fn reported(&self) -> impl Iterator<Item = Key> {
        self.reported.keys()
    }

    /// Whether the API server has reported such a Service or EndpointSlice.
    pub fn has_reported(&self, key: &Key) -> bool {
        self.reported.has(key)
    }

    /// Whether the API server has reported this Service or EndpointSlice with the same content.
    pub fn has_reported_same(&self, object: &Object) -> bool {
        self.reported.has_same(object)
    }

    /// Returns the Service of that name.
    pub fn service(&self, name: &ServiceName) -> Option<&Service> {
        self.folder.services.get(name).or_else(|| self.reported.services.get(name)).map(|service| &**service)
    }

    /// Returns all Services, by name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services_after(None)
    }

    /// Returns the Services after this one in the order of names; all of them if `name` is `None`.
    pub fn services_after(&self, name: Option<&ServiceName>) -> impl Iterator<Item = &Service> {
        let from = (name.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let mut folder = self.folder.services.range(from).peekable();
        let mut reported = self.reported.services.range(from).peekable();
        std::iter::from_fn(move || {
            let order = match (folder.peek(), reported.peek()) {
                (Some((first, _)), Some((other, _))) => first.cmp(other),
                (_, None) => Ordering::Less,
                (None, _) => Ordering::Greater,
            };
            if order.is_gt() {
                return reported.next();
            }
            // The folder's Service hides that of the API server.
            reported.next_if(|_| order.is_eq());
            folder.next()
        })
        .map(|(_, service)| &**service)
    }

    /// Returns the slices of a Service: those of the folder by name, then those of the API server by name.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> {
        let Self { folder, reported, .. } = self;
        let is_hidden = folder.services.contains_key(service);
        let others = reported.slices.get(service).filter(|_| !is_hidden);
        let others = others.into_iter().flat_map(SortedMap::values);
        let own = folder.slices.get(service).into_iter().flat_map(SortedMap::values);
        own.chain(others.filter(|slice| !folder.owners.contains_key(&slice.name)))
    }

    /// Returns the slice of that name, of any Service.
    pub fn slice(&self, name: &SliceName) -> Option<&EndpointSlice> {
        self.folder.slice(name).or_else(|| self.reported.slice(name))
    }

    /// Returns the names of the existing Services with a slice for which this holds.
    fn services_with(&self, is_meant: impl Fn(&EndpointSlice) -> bool) -> impl Iterator<Item = ServiceName> {
        let all = self.folder.slices.iter().chain(&self.reported.slices);
        let meant = all.filter(move |(_, slices)| slices.values().any(&is_meant));
        meant.map(|(name, _)| name).filter(|name| self.service(name).is_some()).cloned()
    }

    /// Adds a problem to those of these Services that both the folder and the API server have; removes it from the others.
    fn note_conflicts(&mut self, changed: &BTreeSet<ServiceName>) {
        for name in changed {
            let Some(service) = self.folder.services.get_mut(name) else { continue };
            let conflict = conflict(name);
            service.problems.retain(|problem| *problem != conflict);
            service.problems.extend(self.reported.services.contains_key(name).then_some(conflict));
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
            changed.extend(self.services().map(|service| service.name.clone()));
        }
        if !old.addresses().eq(self.node.addresses()) {
            changed.extend(self.restricted());
        }
        if old.zone != self.node.zone {
            changed.extend(self.services_with(EndpointSlice::has_hints));
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
        let new = node.map(|node| node.tunnel_ips().to_vec());
        let is_same = old == new;
        others.extend(new.map(|ips| (name.to_owned(), ips)));
        if !is_same {
            changed.extend(self.with_endpoint_on(|node| node == name));
        }
    }

    /// Returns the names of the Services with an endpoint on one of these nodes.
    fn with_endpoint_on(&self, is_meant: impl Fn(&str) -> bool) -> impl Iterator<Item = ServiceName> {
        self.services_with(move |slice| {
            slice.endpoints.iter().any(|endpoint| endpoint.node.as_deref().is_some_and(&is_meant))
        })
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
        let holds = |service: &&Service| service.cluster_ips.iter().any(|ip| differing.contains(ip));
        changed.extend(self.services().filter(holds).map(|service| service.name.clone()));
        changed.extend(self.services_with(|slice| {
            slice.endpoints.iter().any(|endpoint| differing.contains(&endpoint.address))
        }));
    }

    /// Returns the names of the Services with source ranges.
    fn restricted(&self) -> impl Iterator<Item = ServiceName> {
        let restricted = self.services().filter(|service| service.source_ranges.is_some());
        restricted.map(|service| service.name.clone())
    }
}

#[cfg(test)]
mod tests;
