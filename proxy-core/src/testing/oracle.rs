//! The desired and the actual content of the tables, computed in the most naive way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::reason::Verdict;
use proxy_common::service::{KIND_ADDRESS, ServiceEntry};

use crate::model::{ServiceName, TrafficPolicy};
use crate::plan::{
    Access, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan, PortPlan, Scope, ServicePlan,
    ServicePortName,
};
use crate::store::{Contents, FrontendKey, MaglevRow, MemoryStore, Write};
use crate::sync::prefilter::{backend_bit, frontend_bit};

/// What a frontend leads to: a Service port, endpoints with their flags, and the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub port: (String, u8, u8),
    pub endpoints: BTreeMap<(IpAddr, u16), u32>,
    pub affinity: u32,
    pub flags: u16,
    pub kind: u8,
    pub algorithm: u8,
    pub has_table: bool,
    /// The source ranges, if not all clients are allowed.
    pub ranges: BTreeSet<IpNet>,
}

/// Kind of an entry that marks a cluster address.
const ADDRESS: u8 = 5;
/// Kind of an entry that marks an unmanaged address.
const UNMANAGED: u8 = 6;

/// Returns a port as [`Seen::port`] names it.
fn seen_port(id: &ServicePortName) -> (String, u8, u8) {
    (id.text(), id.protocol.number(), id.family.number())
}

/// Returns what every frontend should lead to.
pub fn desired(plans: &BTreeMap<ServiceName, ServicePlan>) -> BTreeMap<FrontendKey, Seen> {
    let all = || {
        plans.values().flat_map(|plan| {
            plan.ports.iter().flat_map(move |(id, port)| {
                port.frontends.iter().map(move |(frontend, what)| (plan.created, id, port, frontend, what))
            })
        })
    };
    // A Service port owns an address and port for clients of both scopes.
    let mut owners = BTreeMap::new();
    for (created, id, _, frontend, what) in all() {
        let rank = (what.kind != FrontendKind::ClusterIp, created, id.clone());
        let best = owners.entry((frontend.address, frontend.port, frontend.protocol)).or_insert(rank.clone());
        *best = rank.min(best.clone());
    }
    let mut desired = BTreeMap::new();
    let left_alone: BTreeSet<_> = plans.values().flat_map(|plan| plan.unmanaged.keys()).collect();
    for (_, id, port, frontend, what) in all() {
        let (not_cluster_ip, _, owner) = &owners[&(frontend.address, frontend.port, frontend.protocol)];
        let is_left_alone = *not_cluster_ip && left_alone.contains(&frontend.address);
        if owner == id && !is_left_alone {
            desired.insert(key(frontend), seen(id, port, what));
        }
    }
    let unmanaged = plans.values().flat_map(|plan| plan.unmanaged.keys().map(|address| (address, UNMANAGED)));
    let live = plans.values().flat_map(|plan| plan.addresses.iter().map(|address| (address, ADDRESS)));
    for (address, kind) in unmanaged.chain(live) {
        let key = FrontendKey { addr: *address, port: 0, proto: 0, scope: 0 };
        desired.insert(key, Seen { kind, ..Seen::default() });
    }
    desired
}

fn key(frontend: &Frontend) -> FrontendKey {
    FrontendKey {
        addr: frontend.address,
        port: frontend.port,
        proto: frontend.protocol.number(),
        scope: u8::from(frontend.scope == Scope::External),
    }
}

/// Algorithms that use a Maglev table.
const HASHES: [u8; 3] = [3, 4, 5];

fn seen(id: &ServicePortName, port: &PortPlan, what: &FrontendPlan) -> Seen {
    let flags = |facts: &BackendFacts| {
        u32::from(facts.local)
            + 2 * u32::from(facts.terminating)
            + 4 * u32::from(facts.in_cluster)
            + 8 * u32::from(facts.in_local)
            + 0x1_0000 * u32::from(facts.weight)
    };
    let (ranges, access) = match what.access {
        Access::Unrestricted => (BTreeSet::new(), 0),
        Access::Ranges { node } => (port.source_ranges.iter().copied().collect(), 8 + 16 * u16::from(node)),
    };
    let is_maglev_outside = port.maglev_outside && what.kind != FrontendKind::ClusterIp && !what.scoped;
    Seen {
        port: seen_port(id),
        endpoints: port
            .slots(what)
            .map(|at| ((at.address, at.port), flags(port.backends.get(at).unwrap())))
            .collect(),
        affinity: port.affinity_secs,
        flags: u16::from(what.when_empty == Verdict::Drop)
            + 512 * u16::from(what.when_empty == Verdict::Pass)
            + 2 * u16::from(what.scoped)
            + 4 * u16::from(what.policy == TrafficPolicy::Local)
            + 64 * u16::from(port.ejects)
            + 256 * u16::from(port.no_sockets)
            + 1024 * u16::from(port.changing != Changing::No && port.slot_count(what) > 1)
            + 2048
                * u16::from(
                    port.changing == Changing::All
                        && what.kind == FrontendKind::ClusterIp
                        && port.slot_count(what) > 1,
                )
            + 4096
                * u16::from(
                    port.rebalances
                        && what.policy == TrafficPolicy::Cluster
                        && !what.scoped
                        && port.slot_count(what) > 1,
                )
            + 8192 * u16::from(what.recent && !what.dsr)
            + 32 * u16::from(is_maglev_outside)
            + access,
        algorithm: port.algorithm as u8,
        has_table: port.slot_count(what) > 1
            && (HASHES.contains(&(port.algorithm as u8)) || is_maglev_outside),
        kind: match what.kind {
            FrontendKind::ClusterIp => 1,
            FrontendKind::NodePort => 2,
            FrontendKind::LoadBalancer => 3,
            FrontendKind::ExternalIp => 4,
        },
        ranges,
    }
}

/// Returns what an entry leads to. Panics if the tables are inconsistent for a reader.
#[track_caller]
pub fn resolve(contents: &Contents, key: &FrontendKey, entry: &ServiceEntry) -> Seen {
    assert_eq!(entry.tag, key.tag(), "{key} has the tag of another key");
    if [ADDRESS, UNMANAGED].contains(&entry.kind) {
        let plain = ServiceEntry { tag: entry.tag, kind: entry.kind, ..ServiceEntry::default() };
        assert_eq!(*entry, plain, "{key}");
        return Seen { kind: entry.kind, ..Seen::default() };
    }
    let outside = FrontendKey { scope: 1, ..*key };
    assert!(
        entry.flags & 2 == 0 || contents.services.contains_key(&outside),
        "{key} sends clients outside to an entry that is not there"
    );
    let name =
        contents.names.get(&entry.id).unwrap_or_else(|| panic!("{key} has id {} without name", entry.id));
    let slots = contents
        .slots
        .get(entry.slot_base as usize..(entry.slot_base + entry.slot_count) as usize)
        .unwrap_or_else(|| panic!("{key} has slots outside of the table: {entry:?}"));
    let rows = if key.addr.is_ipv6() { &contents.backends6 } else { &contents.backends };
    let endpoint = |id: &u32| {
        let row = rows.get(id).unwrap_or_else(|| panic!("{key} leads to backend {id}, which is not there"));
        assert_eq!(row.service, entry.id, "{key} leads to a backend of another Service: {row:?}");
        assert_eq!(row.proto, key.proto, "{key} leads to {row:?}");
        assert!(bit(contents, backend_bit(row)), "no filter bit for {row:?}");
        // The programs select again if the backend is gone.
        (row.state == BACKEND_ACTIVE).then_some(((row.addr, row.port), row.flags))
    };
    let endpoints: BTreeMap<_, _> = slots.iter().filter_map(endpoint).collect();
    let table = contents.maglev.get(&(2 * entry.id + u32::from(entry.flags & 4 != 0)));
    let has_table = |row: &MaglevRow| row.tables().any(|table| table.words != 0);
    assert!(table.is_none_or(has_table), "{key} has a row without a table");
    let needs = HASHES.contains(&entry.algorithm) || entry.flags & 32 != 0;
    for at in destinations(contents, key) {
        assert!(bit(contents, frontend_bit(&at)), "no filter bit for {key} at {at}");
    }
    assert!(entry.flags & 8 != 0 || entry.ranges == 0, "{key} has source ranges without a flag");
    let ranges = contents.source_ranges.iter().filter(|(id, _)| *id == entry.ranges && entry.ranges != 0);
    Seen {
        port: (name.as_str().to_owned(), name.proto, name.family),
        endpoints,
        affinity: entry.affinity_secs,
        flags: entry.flags,
        algorithm: entry.algorithm,
        has_table: needs && slots.len() > 1 && table.is_some_and(|table| table.current.words != 0),
        kind: entry.kind,
        ranges: ranges.map(|(_, range)| *range).collect(),
    }
}

/// Asserts that endpoints have more than one slot exactly if the algorithm is weighted and the weights differ. Rows are
/// written before slots, so this holds only after all writes.
#[track_caller]
fn check_weights(contents: &Contents, key: &FrontendKey, entry: &ServiceEntry) {
    let rows = if key.addr.is_ipv6() { &contents.backends6 } else { &contents.backends };
    let slots = &contents.slots[entry.slot_base as usize..(entry.slot_base + entry.slot_count) as usize];
    let ids: BTreeSet<_> = slots.iter().collect();
    let weights: BTreeSet<u32> = ids.iter().map(|id| rows[*id].flags >> 16).collect();
    let is_weighted = [0, 2, 7, 8, 9, 10].contains(&entry.algorithm) && weights.len() > 1;
    assert_eq!(ids.len() < slots.len(), is_weighted, "{key}: {slots:?}");
}

/// Returns the destinations of packets to a frontend: for a node port, every address on which it answers.
fn destinations(contents: &Contents, key: &FrontendKey) -> Vec<FrontendKey> {
    if !key.addr.is_unspecified() {
        return vec![*key];
    }
    let answers = |(addr, bits): &(&IpAddr, &u32)| **bits & 1 != 0 && addr.is_ipv6() == key.addr.is_ipv6();
    let addresses = contents.node.addresses.iter().filter(answers);
    addresses.map(|(addr, _)| FrontendKey { addr: *addr, ..*key }).collect()
}

fn bit(contents: &Contents, (word, mask): (u32, u64)) -> bool {
    contents.prefilter[word as usize] & mask != 0
}

/// Returns what every frontend leads to.
#[track_caller]
pub fn resolve_all(contents: &Contents) -> BTreeMap<FrontendKey, Seen> {
    contents.services.iter().map(|(key, entry)| (*key, resolve(contents, key, entry))).collect()
}

/// Asserts that the tables hold exactly what the plans ask for.
#[track_caller]
pub fn check(contents: &Contents, plans: &BTreeMap<ServiceName, ServicePlan>) {
    let desired = desired(plans);
    assert_eq!(resolve_all(contents), desired);
    contents.services.iter().for_each(|(key, entry)| check_weights(contents, key, entry));
    no_overlap(contents);
    let owners: BTreeSet<_> = desired.values().map(|seen| seen.port.clone()).collect();
    let ports = plans.values().flat_map(|plan| &plan.ports);
    let programmed = ports.filter(|(id, _)| owners.contains(&seen_port(id)));
    let should: BTreeSet<_> = programmed
        .flat_map(|(id, port)| {
            port.backends.keys().map(|at| (id.text(), id.protocol.number(), at.address, at.port))
        })
        .collect();
    let rows = contents
        .backends
        .values()
        .chain(contents.backends6.values())
        .filter(|row| row.state == BACKEND_ACTIVE);
    let serving: Vec<_> = rows
        .map(|row| (contents.names[&row.service].as_str().to_owned(), row.proto, row.addr, row.port))
        .collect();
    assert_eq!(serving.len(), should.len(), "an endpoint serves twice: {serving:?}");
    assert_eq!(serving.into_iter().collect::<BTreeSet<_>>(), should);
    // A set that no entry uses may be written or removed in part, and so be equal to another.
    let in_use: BTreeSet<u32> = contents.services.values().map(|entry| entry.ranges).collect();
    let mut sets: BTreeMap<u32, BTreeSet<IpNet>> = BTreeMap::new();
    for (id, range) in contents.source_ranges.iter().filter(|(id, _)| in_use.contains(id)) {
        sets.entry(*id).or_default().insert(*range);
    }
    let count = sets.len();
    assert_eq!(sets.into_values().collect::<BTreeSet<_>>().len(), count, "two sets of the same ranges");
}

#[track_caller]
fn no_overlap(contents: &Contents) {
    let extents: BTreeSet<(u32, u32)> = contents
        .services
        .values()
        .filter(|e| e.slot_count > 0)
        .map(|e| (e.slot_base, e.slot_count))
        .collect();
    let mut end = 0;
    for (base, count) in extents {
        assert!(base >= end, "an extent at {base} overlaps the one before, which ends at {end}");
        end = base + count;
    }
    let shared: BTreeSet<(u32, u32)> =
        contents.services.values().filter(|e| e.slot_count > 0).map(|e| (e.slot_base, e.id)).collect();
    let bases: BTreeSet<u32> = shared.iter().map(|(base, _)| *base).collect();
    assert_eq!(shared.len(), bases.len(), "two Service ports share an extent");
}

/// Returns the Service of a port, with protocol and family.
fn service_of((name, protocol, family): &(String, u8, u8)) -> (&str, u8, u8) {
    (name.split(':').next().unwrap_or_default(), *protocol, *family)
}

/// Checks every state of the tables during a sync.
pub type Guard = Arc<Mutex<Transition>>;

/// What each frontend may lead to while a sync runs: the same as before, or what it should lead to afterwards.
#[derive(Default)]
pub struct Transition {
    before: BTreeMap<FrontendKey, Seen>,
    after: BTreeMap<FrontendKey, Seen>,
    /// The endpoints that each port should have.
    endpoints: BTreeMap<(String, u8, u8), BTreeSet<(IpAddr, u16)>>,
    /// If the tables were changed externally or are too small, only the final state is checked.
    pub off: bool,
    /// Writes may fail: an entry that could not be replaced leads to its previous endpoints, without the removed ones and with
    /// those that were removed and are there again.
    pub may_fail: bool,
}

impl Transition {
    pub fn begin(&mut self, contents: &Contents, plans: &BTreeMap<ServiceName, ServicePlan>) {
        if !self.off {
            self.before = resolve_all(contents);
            self.after = desired(plans);
            let ports = plans.values().flat_map(|plan| &plan.ports);
            let endpoints = |port: &PortPlan| port.backends.keys().map(|at| (at.address, at.port)).collect();
            self.endpoints = ports.map(|(id, port)| (seen_port(id), endpoints(port))).collect();
        }
    }

    fn step(&self, contents: &Contents, step: &Write) {
        if self.off {
            return;
        }
        for (key, entry) in &contents.services {
            let seen = resolve(contents, key, entry);
            // The flags of an endpoint may change before or after the set; the set itself is the old or the new one. The
            // source ranges may contain more than they should, but never less.
            let (before, after) = (self.before.get(key), self.after.get(key));
            // A port that is renamed has its new name before the rest changes, also if it loses this frontend.
            let ports = || [before, after].into_iter().flatten().map(|one| &one.port);
            let is_renamed = ports().all(|port| service_of(port) == service_of(&seen.port))
                && (after.is_none() || ports().any(|port| *port == seen.port));
            let port = |one: &Seen| if is_renamed { seen.port.clone() } else { one.port.clone() };
            let plain = |one: &Seen| Seen { endpoints: BTreeMap::new(), port: port(one), ..one.clone() };
            let same = |other: Option<&Seen>| {
                other.is_some_and(|other| {
                    other.endpoints.keys().eq(seen.endpoints.keys()) && plain(other) == plain(&seen)
                })
            };
            let left = |known: &Seen| {
                // An endpoint of a new owner of the frontend is another endpoint, even with the same address. The owner is new if
                // the entry could neither be replaced nor removed, and has the old name.
                let after =
                    after.filter(|after| after.port == known.port || is_renamed && seen.port == after.port);
                let stays = |at: &_| after.is_some_and(|after| after.endpoints.contains_key(at));
                let kept = |at: &_| stays(at) || seen.endpoints.contains_key(at);
                let should_have = [Some(known), after].into_iter().flatten();
                let returned = should_have.filter_map(|one| self.endpoints.get(&one.port)).flatten();
                let returned = returned.filter_map(|at| seen.endpoints.get_key_value(at));
                let endpoints = known.endpoints.iter().filter(|(at, _)| kept(at)).chain(returned);
                Seen { endpoints: endpoints.map(|(at, flags)| (*at, *flags)).collect(), ..known.clone() }
            };
            let is_left = self.may_fail && same(before.map(left).as_ref());
            assert!(
                same(before) || same(after) || is_left,
                "{key} leads to {seen:?}, from {before:?} to {after:?}"
            );
        }
        no_overlap(contents);
        if let Write::Service(key, entry) = step
            && entry.kind == KIND_ADDRESS
            && !self.may_fail
        {
            let is_missing =
                |one: &&FrontendKey| one.addr == key.addr && !contents.services.contains_key(*one);
            let missing = self.after.keys().find(is_missing);
            assert!(missing.is_none(), "clients of {missing:?} are refused until it is written");
        }
        match step {
            Write::Service(key, _) => {
                let (before, after) = (self.before.get(key), self.after.get(key));
                assert!(before != after, "{key} was written although it was right");
            }
            Write::NoService(key) => {
                let owner = |seen: Option<&Seen>| seen.map(|seen| seen.port.clone());
                let (before, after) = (self.before.get(key), self.after.get(key));
                assert!(
                    owner(before) != owner(after) || after.is_none(),
                    "{key} was removed from the port it belongs to"
                );
            }
            _ => {}
        }
    }
}

/// Installs a guard that checks every step of a store.
pub fn guard(store: &mut MemoryStore) -> Guard {
    let guard = Guard::default();
    let inside = Arc::clone(&guard);
    store.watch(Box::new(move |contents, step| inside.lock().unwrap().step(contents, step)));
    guard
}
