//! Rebuilds the mirror from the maps: at the start, and after the maps were changed externally.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::name::PortName;

use super::applied::{Applied, QuarantinePeriods};
use super::index::BackendKey;
use super::reconcile::Reconciler;
use super::removal::has_left;
use super::rows::ShortName;
use super::tables::halves;
use crate::model::net::{IpFamily, Protocol};
use crate::plan::{BackendAddress, ServicePortName};
use crate::store::FilterBit as Bit;
use crate::store::{Backend, Contents, MaglevRow, MapError, Store, Table, Write};

/// The part of the old mirror that is kept when the maps are read again.
#[derive(Default)]
struct KeptState {
    ports: Vec<(ServicePortName, u32)>,
    endpoints: Vec<(BackendKey, u32)>,
    resting_extents: Vec<(u32, u32, u32)>,
    idle_bits: BTreeMap<Bit, Instant>,
}

impl<S: Store> Reconciler<S> {
    /// Reads the maps. Writes nothing: the first [`Reconciler::sync`] writes only what differs from the plans, and removes
    /// invalid entries.
    pub fn recover(store: S, quarantine: QuarantinePeriods, now: Instant) -> Result<Self, MapError> {
        let mut reconciler = Self::new(store, quarantine);
        let contents = reconciler.writer.store.read(u32::MAX)?;
        reconciler.adopt(&contents, KeptState::default(), now);
        Ok(reconciler)
    }

    /// Reads all maps again and compares them with the mirror. Returns the number of different entries; the next sync
    /// repairs them.
    pub fn audit(&mut self, now: Instant) -> Result<usize, MapError> {
        let contents = self.writer.store.read(self.writer.applied.endpoints.high_water())?;
        let drift = if self.releases.orphans.is_empty() {
            differences(&self.writer.applied, &contents)
        } else {
            let mut found = contents.clone();
            found.leave_out(&self.releases.orphans);
            differences(&self.writer.applied, &found)
        };
        if drift > 0 {
            let applied = &self.writer.applied;
            let known = KeptState {
                ports: applied.ports.iter().collect(),
                endpoints: applied.endpoints.iter().collect(),
                resting_extents: applied
                    .extents
                    .quarantined()
                    .map(|(s, base, ids)| (s, base, ids.len() as u32))
                    .collect(),
                idle_bits: applied.prefilter.idle().clone(),
            };
            self.adopt(&contents, known, now);
        }
        Ok(drift)
    }

    /// Replaces the mirror by the content of the maps.
    fn adopt(&mut self, contents: &Contents, known: KeptState, now: Instant) {
        let mut applied = Applied::new(self.writer.store.capacity(), self.quarantine);
        let mut orphans = Vec::new();
        for (port, id) in known.ports {
            applied.ports.restore(port, id);
        }
        for (key, id) in known.endpoints {
            applied.endpoints.restore(key, id);
        }
        for (address, bits) in &contents.node.addresses {
            applied.advance(&Write::NodeAddr(*address, *bits), now, self.writer.number);
        }
        applied.node = contents.node.clone();
        applied.tunnels = contents.node.tunnels.iter().map(|(number, row)| (row.addr, *number)).collect();
        let ports = adopt_names(&mut applied, contents, &mut orphans);
        adopt_backends(&mut applied, contents, &ports, &mut orphans, now);
        for (service, base, len) in known.resting_extents {
            // Take the slots from the map: a changed extent must not be found for ids that it no longer holds.
            if let Some(ids) = slots_of(contents, base, len) {
                applied.extents.restore(service, base, ids);
            }
        }
        for (key, entry) in &contents.services {
            if let Some(ids) = slots_of(contents, entry.slot_base, entry.slot_count) {
                applied.extents.restore(entry.id, entry.slot_base, ids);
            }
            // The id 0 belongs to no port: entries of cluster addresses have it.
            if entry.id != 0 && !ports.contains_key(&entry.id) {
                applied.ports.reserve(entry.id);
                orphans.push(Write::NoName(entry.id));
            }
            applied.advance(&Write::Service(*key, *entry), now, self.writer.number);
        }
        for (index, row) in &contents.maglev {
            if !ports.contains_key(&(index / 2)) {
                // No port may get this id before the entry is removed: the removal would delete the new port's table.
                applied.ports.reserve(index / 2);
                orphans.extend([Write::MaglevIndex(*index, MaglevRow::default()), Write::NoName(index / 2)]);
            }
            for table in row.tables() {
                applied.tables.restore_for(index / 2, table.base, halves(table.signature), table.words);
            }
            applied.advance(&Write::MaglevIndex(*index, row.clone()), now, self.writer.number);
        }
        let invalid = applied.ranges.restore(&contents.source_ranges);
        orphans.extend(invalid.into_iter().map(|(id, range)| Write::NoSourceRange(id, range)));
        applied.ranges.restored(now, self.writer.number);
        applied.extents.retire_unreferenced(now, self.writer.number);
        applied.prefilter.restore(&contents.prefilter);
        applied.prefilter.start_quarantines(now, &known.idle_bits);
        applied.ports.restored();
        applied.endpoints.restored();
        for (key, id) in applied.endpoints.iter().collect::<Vec<_>>() {
            if applied.backends.get(id).is_some_and(has_left) {
                applied.endpoints.retire(&key, now, self.writer.number);
            }
        }
        self.writer.applied = applied;
        self.writer.audit = None;
        self.releases.orphans = orphans;
        self.full = true;
    }
}

/// Takes over the names, and with them the ids of Service ports. Of two ids with the same name, the one in use by entries
/// wins.
fn adopt_names(
    applied: &mut Applied,
    contents: &Contents,
    orphans: &mut Vec<Write>,
) -> BTreeMap<u32, ServicePortName> {
    let in_use: BTreeSet<u32> = contents.services.values().map(|entry| entry.id).collect();
    let mut ports: BTreeMap<u32, ServicePortName> =
        applied.ports.iter().map(|(port, id)| (id, port)).collect();
    let (first, then): (Vec<_>, Vec<_>) = contents.names.iter().partition(|(id, _)| in_use.contains(id));
    for (id, name) in first.into_iter().chain(then) {
        let known = ports.contains_key(id);
        let restored = || parse(name).filter(|port| applied.ports.restore(port.clone(), *id));
        if let Some(port) = (!known).then(restored).flatten() {
            ports.insert(*id, port);
        } else if !known {
            applied.ports.reserve(*id);
            orphans.push(Write::NoName(*id));
            continue;
        }
        applied.names.insert(*id, ShortName::from(name));
    }
    ports
}

/// Takes over the rows of endpoints, and with them their ids. Active ones come first.
fn adopt_backends(
    applied: &mut Applied,
    contents: &Contents,
    ports: &BTreeMap<u32, ServicePortName>,
    orphans: &mut Vec<Write>,
    now: Instant,
) {
    let known: BTreeMap<u32, BackendKey> = applied.endpoints.iter().map(|(key, id)| (id, key)).collect();
    let rows = contents.backends.iter().chain(&contents.backends6);
    let (serving, others): (Vec<_>, Vec<_>) = rows.partition(|(_, row)| row.state == BACKEND_ACTIVE);
    for (id, row) in serving.into_iter().chain(others) {
        let key = (row.service, BackendAddress { address: row.addr, port: row.port });
        let ours = match known.get(id) {
            // The row may have been changed externally; if its family is right, the next sync writes it again.
            Some((_, at)) => at.address.is_ipv4() == row.addr.is_ipv4(),
            None => fits(row, ports) && applied.endpoints.restore(key, *id),
        };
        if ours {
            applied.advance(&Write::Backend(*id, *row), now, 0);
        } else {
            applied.endpoints.reserve(*id);
            orphans.push(Write::NoBackend(*id, Table::backends(row.addr)));
        }
    }
}

fn fits(row: &Backend, ports: &BTreeMap<u32, ServicePortName>) -> bool {
    let suits =
        |port: &ServicePortName| port.family == IpFamily::of(row.addr) && port.protocol.number() == row.proto;
    ports.get(&row.service).is_some_and(suits)
}

/// Returns the ids in an extent; `None` if it is empty or outside of the table.
fn slots_of(contents: &Contents, base: u32, count: u32) -> Option<Vec<u32>> {
    let base = base as usize;
    let ids = contents.slots.get(base..base.checked_add(count as usize)?)?;
    (count > 0).then(|| ids.to_vec())
}

/// Returns the Service port of a name; `None` if the name is malformed.
fn parse(name: &PortName) -> Option<ServicePortName> {
    let (namespace, rest) = name.as_str().split_once('/')?;
    let (service, port) = rest.split_once(':').unwrap_or((rest, ""));
    let family = [IpFamily::V4, IpFamily::V6].into_iter().find(|family| family.number() == name.family)?;
    let port = ServicePortName {
        namespace: namespace.into(),
        name: service.into(),
        port: port.into(),
        protocol: Protocol::from_number(name.proto)?,
        family,
    };
    (!namespace.is_empty() && !service.is_empty() && port.text() == name.as_str()).then_some(port)
}

/// Returns the number of entries in which the maps differ from the mirror.
fn differences(applied: &Applied, contents: &Contents) -> usize {
    let has_slots =
        |base, ids: &[u32]| slots_of(contents, base, ids.len() as u32).is_some_and(|found| found == ids);
    let wrong_slots = applied.extents.iter().filter(|(base, ids)| !has_slots(*base, ids)).count();
    let bits = applied.prefilter.words().iter().zip(&contents.prefilter);
    let wrong_bits: u32 = bits.map(|(ours, found)| (ours ^ found).count_ones()).sum();
    let ranges: BTreeSet<_> = applied.ranges.iter().collect();
    let backends = contents.backends.iter().chain(&contents.backends6);
    let names = contents.names.iter().map(|(id, name)| (*id, ShortName::from(name)));
    let (ours, found) = (&applied.node, &contents.node);
    unequal(&ours.rows, &found.rows)
        + unequal(&ours.addresses, &found.addresses)
        + unequal(&ours.tunnels, &found.tunnels)
        + unequal(&ours.devices, &found.devices)
        + usize::from(ours.config != found.config)
        + ranges.symmetric_difference(&contents.source_ranges).count()
        + unequal(&applied.services, &contents.services)
        + unequal(applied.names.iter().map(|(id, name)| (id, name.clone())), names)
        + unequal(&applied.maglev, &contents.maglev)
        // An id may be in both maps.
        + unequal(
            applied.backends.iter().map(|(id, row)| ((id, row.addr.is_ipv6()), row)),
            backends.map(|(id, row)| ((*id, row.addr.is_ipv6()), row)),
        )
        + wrong_slots
        + wrong_bits as usize
}

fn unequal<K: Ord, V: PartialEq>(
    ours: impl IntoIterator<Item = (K, V)>,
    found: impl IntoIterator<Item = (K, V)>,
) -> usize {
    let mut found: BTreeMap<K, V> = found.into_iter().collect();
    let wrong = ours.into_iter().filter(|(key, value)| found.remove(key).as_ref() != Some(value)).count();
    wrong + found.len()
}
