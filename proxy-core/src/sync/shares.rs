//! Which Services fit into the tables, if the Services of all namespaces together need more than there is.
//!
//! The rule is max-min fairness: a namespace that needs no more than an equal share of what is left is served, and the
//! larger ones share the rest. Within a namespace, the older Services come first, then the smaller, then the one whose name sorts
//! first; those that need more than an equal share, and more than an eighth of what the namespace may have, come behind all others.
//! So a Service never loses because of a large one that grows, nor because of newer ones, and every node has the same result,
//! whatever the order of the events. An eighth of each table is not planned: endpoints that change, and entries in quarantine, take it ([`Reserve`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proxy_common::select::Algorithm;

use super::applied::Applied;
use super::entries::needs_table;
use crate::model::net::IpFamily;
use crate::model::{Name, Problem, ServiceName, TrafficPolicy};
use crate::plan::maglev::length;
use crate::plan::{Access, FrontendPlan, PortPlan, ServicePlan, ServicePortName, weights};
use crate::store::{Capacity, Table};

/// The part of a table that is not planned.
pub(super) const RESERVE: usize = 8;

/// A Service that needs more than one part in this many of what its namespace may have is large.
const LARGE: u64 = 8;

/// What Services share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Resource {
    /// Ids of Service ports.
    Ports,
    Frontends,
    Frontends6,
    Ranges,
    Ranges6,
    Slots,
    /// Ids of endpoints.
    Backends,
    /// Words of Maglev tables.
    Maglev,
}

impl Resource {
    const ALL: [Self; 8] = [
        Self::Ports,
        Self::Frontends,
        Self::Frontends6,
        Self::Ranges,
        Self::Ranges6,
        Self::Slots,
        Self::Backends,
        Self::Maglev,
    ];

    const fn table(self) -> Table {
        match self {
            Self::Ports => Table::Names,
            Self::Frontends => Table::Services,
            Self::Frontends6 => Table::Services6,
            Self::Ranges => Table::SrcRanges,
            Self::Ranges6 => Table::SrcRanges6,
            Self::Slots => Table::Slots,
            Self::Backends => Table::Backends,
            Self::Maglev => Table::Maglev,
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Ports => "Service ports",
            Self::Frontends | Self::Frontends6 => "frontends",
            Self::Ranges | Self::Ranges6 => "source ranges",
            Self::Slots => "slots",
            Self::Backends => "backends",
            Self::Maglev => "words of Maglev tables",
        }
    }

    /// Returns how much there is. Id 0 and word 0 are not used.
    fn capacity(self, capacity: &Capacity) -> u64 {
        u64::from(match self {
            Self::Ports => capacity.services.saturating_sub(1),
            Self::Frontends | Self::Frontends6 => capacity.frontends,
            Self::Ranges | Self::Ranges6 => capacity.ranges,
            Self::Slots => capacity.slots,
            Self::Backends => capacity.backends.saturating_sub(1),
            Self::Maglev => capacity.maglev.saturating_sub(1),
        })
    }

    /// Returns how much of it may be planned.
    pub(super) fn budget(self, capacity: &Capacity) -> u64 {
        let all = self.capacity(capacity);
        all - all / RESERVE as u64
    }
}

/// How much of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    all: [u64; Resource::ALL.len()],
    /// The endpoints without which a frontend would have none.
    least_endpoints: u64,
}

impl Need {
    fn of(plan: &ServicePlan) -> Self {
        #[cfg(test)]
        tests::COUNTED.set(tests::COUNTED.get() + 1);
        let mut need = Self::default();
        let mut ranges = [0, 0];
        for (id, port) in plan.ports.iter().filter(|(_, port)| !port.frontends.is_empty()) {
            need.add(Resource::Ports, 1);
            need.add(Resource::Backends, port.backends.len());
            let mut tables = BTreeMap::new();
            for (frontend, what) in &port.frontends {
                let v6 = frontend.address.is_ipv6();
                need.add(if v6 { Resource::Frontends6 } else { Resource::Frontends }, 1);
                if what.access != Access::Unrestricted {
                    let most = &mut ranges[usize::from(id.family == IpFamily::V6)];
                    *most = port.source_ranges.len().max(*most);
                }
                if needs_table(port, what) {
                    tables.insert(what.policy == TrafficPolicy::Local, port.slot_count(what));
                }
            }
            need.least_endpoints += least_endpoints(port) as u64;
            // Equal lists share an extent.
            need.add(Resource::Slots, lists(port).map(|what| slot_count(port, what)).sum());
            need.add(Resource::Maglev, tables.into_values().map(|count| length(count) as usize).sum());
        }
        need.add(Resource::Ranges, ranges[0]);
        need.add(Resource::Ranges6, ranges[1]);
        need
    }

    fn add(&mut self, resource: Resource, count: usize) {
        self.all[resource as usize] += count as u64;
    }

    /// Replaces the need `old`, which is a part of this one.
    fn replace(&mut self, old: Self, new: Self) {
        for (all, (old, new)) in self.all.iter_mut().zip(old.all.into_iter().zip(new.all)) {
            *all = (*all + new).saturating_sub(old);
        }
    }

    const fn get(&self, resource: Resource) -> u64 {
        self.all[resource as usize]
    }

    /// Returns the least with which the Service can be served: one endpoint for each list of a port; of other resources, all.
    const fn least(&self, resource: Resource) -> u64 {
        if matches!(resource, Resource::Backends) { self.least_endpoints } else { self.get(resource) }
    }
}

/// Returns a frontend for each of the different lists of endpoints.
fn lists(port: &PortPlan) -> impl Iterator<Item = &FrontendPlan> {
    // Frontends of a port share their lists, which may be long.
    let by_address: BTreeMap<_, _> =
        port.frontends.values().map(|what| (what.slots.as_ref().map(|list| list.as_ptr()), what)).collect();
    let by_content: BTreeMap<_, _> =
        by_address.into_values().map(|what| (what.slots.as_deref(), what)).collect();
    by_content.into_values()
}

/// Returns with how many endpoints each frontend of the port that has endpoints has one.
pub(super) fn least_endpoints(port: &PortPlan) -> usize {
    let used = lists(port).filter(|what| port.slots(what).next().is_some()).count();
    used.min(port.backends.len())
}

/// Returns the number of slots of a frontend; an endpoint has as many as its weight. The larger numbers of a slow start do not
/// count: a Service must not be refused because its endpoints start.
fn slot_count(port: &PortPlan, what: &FrontendPlan) -> usize {
    let weight = |at| port.backends.get(at).map_or(1, |facts| u32::from(facts.weight.max(1)));
    let mut all = port.slots(what).map(weight);
    let first = all.next();
    let repeats = Algorithm::repeats_slots(port.algorithm) && all.any(|weight| Some(weight) != first);
    if repeats {
        weights::slots(&port.slots(what).map(weight).collect::<Vec<_>>()).len()
    } else {
        port.slot_count(what)
    }
}

/// Returns the most that one of the `needs` may get, so that all together get no more than `budget`; and how many of those
/// that need more may get one more.
fn fair_share(needs: impl IntoIterator<Item = u64>, budget: u64) -> (u64, u64) {
    let mut needs: Vec<u64> = needs.into_iter().collect();
    needs.sort_unstable();
    let (mut left, count) = (budget, needs.len());
    for (done, need) in needs.into_iter().enumerate() {
        let larger = (count - done) as u64;
        let share = left / larger;
        if need > share {
            return (share, left % larger);
        }
        left -= need;
    }
    (u64::MAX, 0)
}

/// Why a Service does not get all that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shortage {
    resource: Resource,
    need: u64,
    /// What the Services of the namespace may have together.
    share: u64,
    capacity: u64,
}

/// The part of its endpoints that a Service may have, counted once for each port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    count: u64,
    /// How many of them a frontend would lack most: the first ones of each list of a port.
    least: u64,
    shortage: Shortage,
}

/// The limits of a Service that needs more than there is for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Limit {
    refused: Option<Shortage>,
    no_table: Option<Shortage>,
    endpoints: Option<Part>,
}

impl Limit {
    fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Whether the Service may have no Maglev table.
    pub(super) fn has_no_table(&self) -> bool {
        self.no_table.is_some()
    }

    /// Returns how many of its endpoints a port may have: the `least` with which each of its frontends has one, and each port the
    /// same part of the others.
    pub(super) fn endpoints(&self, of: usize, least: usize) -> usize {
        let Some(part) = self.endpoints else { return of };
        let (others, all) =
            (part.count.saturating_sub(part.least), part.shortage.need.saturating_sub(part.least));
        least + (of.saturating_sub(least) as u64 * others / all.max(1)) as usize
    }

    fn problems(&self, name: &ServiceName) -> impl Iterator<Item = Problem> {
        let effects = [
            (self.refused, "the Service is not programmed"),
            (self.endpoints.map(|part| part.shortage), "some endpoints get no connections"),
            (self.no_table, "endpoints are selected without a Maglev table"),
        ];
        let object = format!("Service {name}");
        let namespace = name.namespace.clone();
        effects.into_iter().filter_map(|(shortage, effect)| Some((shortage?, effect))).map(
            move |(Shortage { resource, need, share, capacity }, effect)| Problem {
                object: object.clone(),
                field: "spec".to_owned(),
                message: format!(
                    "{effect}: it needs {need} {}; all Services of namespace {namespace} together may have {share} of \
                     {capacity}, and smaller and older ones come first; raise {}",
                    resource.unit(),
                    resource.table().setting()
                ),
            },
        )
    }
}

/// The needs of all Services, and the limits of those that do not fit.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// The needs of each Service, and the time of its creation.
    needs: BTreeMap<ServiceName, (Need, i64)>,
    /// The needs of each namespace that needs anything. The reserve of a sync shares them until the next sync.
    of_namespaces: Arc<BTreeMap<Name, Need>>,
    total: Need,
    /// The resources of which the needs have changed since the last update.
    changed: BTreeSet<Resource>,
    /// The resources of which there was too little at the last update.
    short: BTreeSet<Resource>,
    limits: BTreeMap<ServiceName, Limit>,
}

impl Shares {
    /// Replaces the plan of a Service.
    pub(super) fn replace(&mut self, name: &ServiceName, new: Option<&ServicePlan>) {
        let new = new.map(|plan| (Need::of(plan), plan.created));
        let old = match new {
            Some(new) => self.needs.insert(name.clone(), new),
            None => self.needs.remove(name),
        };
        let ((old, was_created), (new, is_created)) = (old.unwrap_or_default(), new.unwrap_or_default());
        // The older of two Services with equal needs comes first.
        let differs = |resource: &Resource| {
            let [old, new] = [old, new].map(|need| (need.get(*resource), need.least(*resource)));
            old != new || (old.0 > 0 && was_created != is_created)
        };
        self.changed.extend(Resource::ALL.into_iter().filter(differs));
        if old == new {
            return;
        }
        self.total.replace(old, new);
        let of_namespaces = Arc::make_mut(&mut self.of_namespaces);
        let all = of_namespaces.entry(name.namespace.clone()).or_default();
        all.replace(old, new);
        if *all == Need::default() {
            of_namespaces.remove(&name.namespace);
        }
    }

    /// Returns the reserve for a sync.
    pub(super) fn reserve(&self) -> Reserve {
        Reserve { needs: Arc::clone(&self.of_namespaces), uses: BTreeMap::new() }
    }

    /// Decides which Services fit; returns those whose limits have changed, and whether each one was refused before.
    pub(super) fn update(&mut self, capacity: &Capacity) -> BTreeMap<ServiceName, bool> {
        let is_short = |resource: &Resource| self.total.get(*resource) > resource.budget(capacity);
        let short = Resource::ALL.into_iter().filter(is_short).collect();
        let known = std::mem::replace(&mut self.short, short);
        if std::mem::take(&mut self.changed).is_disjoint(&self.short) && known == self.short {
            return BTreeMap::new();
        }
        let limits = limits(&self.needs, &self.of_namespaces, &self.short, capacity);
        let before = std::mem::replace(&mut self.limits, limits);
        let differs = |name: &&ServiceName| before.get(*name) != self.limits.get(*name);
        let was_refused = |name: &ServiceName| before.get(name).is_some_and(Limit::is_refused);
        let names = before.keys().chain(self.limits.keys()).filter(differs);
        names.map(|name| (name.clone(), was_refused(name))).collect()
    }

    /// Whether the Service may have no entry in the maps.
    pub(super) fn is_refused(&self, name: &ServiceName) -> bool {
        self.limits.get(name).is_some_and(Limit::is_refused)
    }

    /// Returns the limits of a Service that does not fit.
    pub(super) fn limit(&self, name: &ServiceName) -> Option<&Limit> {
        self.limits.get(name)
    }

    /// Returns the problems of the Services that do not fit.
    pub(super) fn problems(&self) -> impl Iterator<Item = Problem> {
        self.limits.iter().flat_map(|(name, limit)| limit.problems(name))
    }
}

/// Returns the limits of all Services that do not fit into the `short` resources.
fn limits(
    needs: &BTreeMap<ServiceName, (Need, i64)>,
    of_namespaces: &BTreeMap<Name, Need>,
    short: &BTreeSet<Resource>,
    capacity: &Capacity,
) -> BTreeMap<ServiceName, Limit> {
    let mut limits: BTreeMap<ServiceName, Limit> = BTreeMap::new();
    // What a refused Service needs of the later resources is left to the others.
    let mut of_namespaces = of_namespaces.clone();
    for resource in short.iter().copied() {
        let budget = resource.budget(capacity);
        let sums = of_namespaces.values().map(|need| need.get(resource));
        if sums.clone().sum::<u64>() <= budget {
            continue;
        }
        let (share, more) = fair_share(sums, budget);
        let larger = of_namespaces.iter_mut().filter(|(_, all)| all.get(resource) > share);
        // The names decide about what cannot be divided.
        for (number, (namespace, all)) in (0..).zip(larger) {
            let share = share + u64::from(number < more);
            if all.get(resource) <= share {
                continue;
            }
            let first = ServiceName { namespace: namespace.clone(), name: Name::default() };
            let services = needs.range(first..).take_while(|(name, _)| name.namespace == *namespace);
            let counts = |(name, (need, _)): &(&ServiceName, &(Need, i64))| {
                #[cfg(test)]
                tests::VISITED.set(tests::VISITED.get() + 1);
                need.get(resource) > 0 && !limits.get(*name).is_some_and(Limit::is_refused)
            };
            let mut services: Vec<_> = services.filter(counts).collect();
            let fair = fair_share(services.iter().map(|(_, (need, _))| need.get(resource)), share).0;
            let large = fair.max(share / LARGE);
            services.sort_by_key(|(name, (need, created))| {
                let need = need.get(resource);
                (need > large, *created, need, *name)
            });
            let mut left = share;
            let has_least = |(_, (needed, _)): &(&ServiceName, &(Need, i64))| {
                let after = left.checked_sub(needed.least(resource));
                left = after.unwrap_or(left);
                after.is_some()
            };
            let (some, none): (Vec<_>, Vec<_>) = services.into_iter().partition(has_least);
            for (name, (needed, _)) in some {
                let (need, least) = (needed.get(resource), needed.least(resource));
                let more = left.min(need - least);
                left -= more;
                if least + more < need {
                    let shortage = Shortage { resource, need, share, capacity: resource.capacity(capacity) };
                    let part = Part { count: least + more, least, shortage };
                    limits.entry(name.clone()).or_default().endpoints = Some(part);
                }
            }
            for (name, (needed, _)) in none {
                let need = needed.get(resource);
                let shortage = Shortage { resource, need, share, capacity: resource.capacity(capacity) };
                let limit = limits.entry(name.clone()).or_default();
                if resource == Resource::Maglev {
                    limit.no_table = Some(shortage);
                } else {
                    limit.refused = Some(shortage);
                    all.replace(*needed, Need::default());
                }
            }
        }
    }
    limits
}

/// Keeps the last part of each table for namespaces that use little: one that changes its objects fast may not fill the
/// table with entries in quarantine. Valid for one sync.
#[derive(Debug, Default)]
pub(super) struct Reserve {
    needs: Arc<BTreeMap<Name, Need>>,
    /// The use of the resources of which only the reserve is left.
    uses: BTreeMap<Resource, Use>,
}

/// The use of a resource, entries in quarantine included.
#[derive(Debug)]
struct Use {
    of_namespaces: BTreeMap<Name, u64>,
    /// The most that a namespace may use beyond its planned need.
    share: u64,
    /// The most that is planned for a namespace.
    planned: u64,
    /// The most that a namespace may use in addition to its planned need.
    extra: u64,
}

impl Reserve {
    /// Whether a port may take `count` more, which then counts as used.
    pub(super) fn allows(
        &mut self,
        applied: &Applied,
        capacity: &Capacity,
        resource: Resource,
        port: &ServicePortName,
        count: u64,
    ) -> bool {
        let used = match resource {
            Resource::Ports => applied.ports.used() as u64,
            Resource::Backends => applied.endpoints.used() as u64,
            Resource::Slots => u64::from(applied.extents.slots_used()),
            Resource::Maglev => u64::from(applied.tables.slots_used()),
            Resource::Ranges | Resource::Ranges6 => applied.ranges.used(resource.table()) as u64,
            // They have no quarantine.
            Resource::Frontends | Resource::Frontends6 => 0,
        };
        let fits = used + count <= resource.budget(capacity);
        // A namespace that is alone takes nothing from others.
        if self.needs.len() < 2 || (fits && !self.uses.contains_key(&resource)) {
            return true;
        }
        let all =
            self.uses.entry(resource).or_insert_with(|| Use::of(applied, &self.needs, resource, capacity));
        let need = self.needs.get(&port.namespace).map_or(0, |need| need.get(resource));
        let planned = need.min(all.planned);
        let most = planned.max(all.share.min(planned + all.extra));
        let used = all.of_namespaces.entry(port.namespace.clone()).or_default();
        let is_allowed = fits || *used + count <= most;
        *used += if is_allowed { count } else { 0 };
        is_allowed
    }
}

impl Use {
    fn of(applied: &Applied, needs: &BTreeMap<Name, Need>, resource: Resource, capacity: &Capacity) -> Self {
        let names: BTreeMap<u32, Name> =
            applied.ports.iter().map(|(port, id)| (id, port.namespace)).collect();
        let mut of_namespaces: BTreeMap<Name, u64> = names.values().map(|name| (name.clone(), 0)).collect();
        let mut add = |id: u32, count: u32| {
            if let Some(used) = names.get(&id).and_then(|name| of_namespaces.get_mut(name)) {
                *used += u64::from(count);
            }
        };
        match resource {
            Resource::Ports => names.keys().for_each(|id| add(*id, 1)),
            Resource::Backends => applied.endpoints.iter().for_each(|((port, _), _)| add(port, 1)),
            Resource::Slots => applied.extents.sizes().for_each(|(_, port, len)| add(port, len)),
            // Previous tables do not count: they leave when another table needs their room.
            Resource::Maglev => {
                let previous: BTreeSet<u32> =
                    applied.maglev.values().flat_map(|row| &row.previous).map(|table| table.base).collect();
                let tables = applied.tables.sizes().filter(|(base, ..)| !previous.contains(base));
                tables.for_each(|(_, port, len)| add(port, len));
            }
            Resource::Ranges | Resource::Ranges6 => {
                applied.ranges.sizes(resource.table()).for_each(|(port, len)| add(port, len));
            }
            Resource::Frontends | Resource::Frontends6 => {}
        }
        let budget = resource.budget(capacity);
        // One that replaces all that it has leaves the other half.
        let extra = (resource.capacity(capacity) - budget) / 2;
        // The largest takes nothing more, even if it has less than its share: what is left is for the others.
        let largest = of_namespaces.values().copied().max().unwrap_or_default();
        Self {
            share: fair_share(of_namespaces.values().copied(), budget + extra).0.min(largest),
            planned: fair_share(needs.values().map(|need| need.get(resource)), budget).0,
            extra,
            of_namespaces,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::IpAddr;

    use ipnet::IpNet;

    use super::*;
    use crate::sync::tests::ROOMY;
    use crate::testing::generator::service;

    thread_local! {
        /// How often the need of a plan was computed.
        pub(super) static COUNTED: Cell<usize> = const { Cell::new(0) };
        /// How many Services were looked at for limits.
        pub(super) static VISITED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn need_is_computed_once_for_each_plan() {
        let capacity = Capacity { slots: 40, ..ROOMY };
        let mut shares = Shares::default();
        let before = COUNTED.get();
        for round in 1..10 {
            let (name, plan) = service("rolls", 0, 0..round);
            shares.replace(&name, plan.as_ref());
            let (name, plan) = service(&round.to_string(), round, 0..9);
            shares.replace(&name, plan.as_ref());
            shares.update(&capacity);
            assert_eq!(COUNTED.get() - before, 2 * usize::from(round), "{round}");
        }
        assert!(!shares.limits.is_empty());
    }

    /// Returns how many of its 10 endpoints each of 10 Services may have; `None`: it is refused.
    fn parts(backends: u32) -> Vec<Option<usize>> {
        let mut shares = Shares::default();
        let names: Vec<_> = (0..10u8)
            .map(|number| {
                let (name, mut plan) = service(&number.to_string(), number, 0..10);
                plan.iter_mut().for_each(|plan| plan.created = number.into());
                shares.replace(&name, plan.as_ref());
                name
            })
            .collect();
        shares.update(&Capacity { backends, ..ROOMY });
        let part = |name| {
            let ports = shares.needs[name].0.get(Resource::Ports) as usize;
            let all = |of| shares.limit(name).map_or(of, |limit| limit.endpoints(of, 1));
            (!shares.is_refused(name)).then(|| ports * all(10))
        };
        names.iter().map(part).collect()
    }

    #[test]
    fn service_without_room_has_one_endpoint() {
        assert_eq!(parts(1000), [Some(10); 10]);
        // 49 of 56 ids may be used.
        assert_eq!(parts(57)[..5], [Some(10), Some(10), Some(10), Some(10), Some(4)]);
        assert_eq!(parts(57)[5..], [Some(1); 5]);
        let parts = parts(8);
        assert_eq!((&parts[..7], &parts[7..]), (&[Some(1); 7][..], &[None; 3][..]));
    }

    #[test]
    fn limits_visit_no_service_unless_a_short_resource_changes() {
        let capacity = Capacity { ranges: 8, ..ROOMY };
        let mut shares = Shares::default();
        let mut change = |number: u8, endpoints: u8, ranges: u8| {
            let (name, mut plan) = service(&number.to_string(), number, 0..endpoints);
            for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
                port.source_ranges =
                    (0..ranges).map(|last| IpNet::from(IpAddr::from([10, 0, 0, last]))).collect();
                port.frontends.values_mut().for_each(|what| what.access = Access::Ranges { node: false });
            }
            // A Service of another namespace, which has little.
            let name =
                ServiceName { namespace: if number == 9 { "shop".into() } else { name.namespace }, ..name };
            shares.replace(&name, plan.as_ref());
            let before = VISITED.get();
            let changed = shares.update(&capacity);
            (changed.len(), VISITED.get() - before)
        };
        for number in 0..7 {
            assert_eq!(change(number, 1, 1), (0, 0), "{number}");
        }
        assert_eq!(change(9, 1, 1), (1, 7), "the Services of the larger namespace");
        for endpoints in 2..20 {
            assert_eq!(change(3, endpoints, 1), (0, 0), "only source ranges are short");
        }
        assert_eq!(change(3, 20, 2), (2, 7), "the largest one is refused now");
        assert_eq!(change(9, 1, 0), (1, 7), "the share has grown");
        assert_eq!(change(3, 20, 1), (1, 0), "nothing is short");
    }
}
