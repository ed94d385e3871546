//! The agent's mirror of the maps. It changes only after the mirrored write has succeeded.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::node::{NODE_ADDR_PORTS, NodeAddr};
use proxy_common::select::is_by_load;
use proxy_common::service::{SCOPE_INTERNAL, ServiceEntry};

use super::extents::ExtentAllocator;
use super::ids::IdAllocator;
use super::index::{BackendKey, ByPort};
use super::prefilter::{Prefilter, backend_bit, frontend_bit};
use super::ranges::RangeSets;
use super::rows::{Rows, ShortName};
use crate::model::net::IpFamily;
use crate::model::{SortedSet, pack};
use crate::plan::ServicePortName;
use crate::store::FilterBit as Bit;
use crate::store::{
    Backend, Capacity, FrontendKey, MaglevRow, MaglevTable, NodeContents, Table, TunnelRow, Write,
};

/// Quarantine periods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuarantinePeriods {
    /// Of a replaced extent of slots: longer than any run of a program.
    pub extent: Duration,
    /// Of the id of an endpoint or of a Service port.
    pub id: Duration,
    /// Of a bit of the filter; extended while a connection needs it.
    pub prefilter: Duration,
    /// Of a replaced Maglev table: the drain period.
    pub table: Duration,
}

impl Default for QuarantinePeriods {
    fn default() -> Self {
        Self {
            extent: Duration::from_secs(1),
            id: Duration::from_mins(1),
            prefilter: Duration::from_hours(1),
            table: Duration::from_mins(10),
        }
    }
}

/// Returns the allocator of the words of `maglev`. It never frees word 0, because a base of 0 means "no table".
fn tables(words: u32, hold: Duration) -> ExtentAllocator {
    let mut tables = ExtentAllocator::new(words, hold);
    if tables.restore(0, 0, vec![0]) {
        tables.reference(0, 1);
    }
    tables
}

/// The mirror of the maps, and the allocators of their ids and extents.
#[derive(Clone, Debug)]
pub struct Applied {
    pub services: BTreeMap<FrontendKey, ServiceEntry>,
    pub frontends: Rows<SortedSet<FrontendKey>>,
    pub backends: Rows<Backend>,
    pub names: Rows<ShortName>,
    pub prefilter: Prefilter,
    pub extents: ExtentAllocator,
    /// The Maglev tables, by index ([`proxy_common::maglev::index`]).
    pub maglev: BTreeMap<u32, MaglevRow>,
    /// The drain periods of the previous tables.
    pub(super) drains: Drains,
    /// Since when there was no room for the table of these indexes.
    pub(super) outdated: BTreeMap<u32, Instant>,
    /// The allocator of the words of `maglev`. It identifies a table by the two halves of its signature.
    pub tables: ExtentAllocator,
    /// Ids of Service ports.
    pub ports: IdAllocator<ServicePortName>,
    /// Ids of endpoints.
    pub endpoints: IdAllocator<BackendKey, ByPort>,
    /// Number of active backends.
    pub active: usize,
    /// Number of frontends whose algorithm uses open connections.
    pub by_load: usize,
    /// Number of IPv6 frontends.
    pub services6: usize,
    /// Number of entries that stand for a cluster address, and not for a frontend.
    pub addresses: usize,
    /// The sets of source ranges.
    pub ranges: RangeSets,
    /// The content of the maps that describe the node.
    pub node: NodeContents,
    /// The number of each address in [`NodeContents::tunnels`].
    pub tunnels: BTreeMap<IpAddr, u32>,
    /// Frontends of node ports, whose address is unspecified.
    pub node_ports: BTreeSet<FrontendKey>,
}

impl Applied {
    pub fn new(capacity: Capacity, quarantine: QuarantinePeriods) -> Self {
        Self {
            services: BTreeMap::new(),
            frontends: Rows::default(),
            backends: Rows::default(),
            names: Rows::default(),
            prefilter: Prefilter::new(quarantine.prefilter),
            extents: ExtentAllocator::new(capacity.slots, quarantine.extent),
            maglev: BTreeMap::new(),
            drains: Drains::new(quarantine.table),
            outdated: BTreeMap::new(),
            tables: tables(capacity.maglev, quarantine.extent),
            ports: IdAllocator::new(capacity.services, quarantine.id),
            endpoints: IdAllocator::new(capacity.backends, quarantine.id),
            active: 0,
            by_load: 0,
            services6: 0,
            addresses: 0,
            ranges: RangeSets::new(capacity.ranges, quarantine.extent),
            node: NodeContents::default(),
            tunnels: BTreeMap::new(),
            node_ports: BTreeSet::new(),
        }
    }

    /// Rebuilds trees that have grown; afterwards they take little more than half of the memory.
    pub fn pack(&mut self) {
        pack(&mut self.services);
        self.ports.pack();
        self.extents.pack();
        self.tables.pack();
    }

    /// Returns the time at which a sync removes previous tables, even if nothing changes.
    pub fn next_drained(&self) -> Option<Instant> {
        let hold = self.drains.hold(self.tables.is_half_full());
        self.drains.since.values().min().map(|since| *since + hold)
    }

    /// Returns the endpoints of a Service port that have ids, quarantined or not.
    pub fn endpoints_of(&self, service: u32) -> impl Iterator<Item = (BackendKey, u32)> {
        self.endpoints.index().of(service)
    }

    /// Returns the frontends whose entries have this id.
    pub fn frontends_of(&self, service: u32) -> impl Iterator<Item = &FrontendKey> {
        self.frontends.get(service).into_iter().flatten()
    }

    /// Returns the filter bits of a frontend: a node port has one for each address on which it answers.
    pub fn frontend_bits(&self, key: &FrontendKey) -> Vec<Bit> {
        if key.port == 0 {
            return Vec::new();
        }
        if !key.addr.is_unspecified() {
            return vec![frontend_bit(key)];
        }
        let family = IpFamily::of(key.addr);
        let answers = |(address, bits): &(&IpAddr, &NodeAddr)| {
            *bits & NODE_ADDR_PORTS != 0 && IpFamily::of(**address) == family
        };
        let addresses = self.node.addresses.iter().filter(answers);
        addresses.map(|(address, _)| frontend_bit(&FrontendKey { addr: *address, ..*key })).collect()
    }

    /// Returns the filter bits of all node ports at an address of the node.
    pub fn address_bits(&self, address: IpAddr) -> impl Iterator<Item = Bit> {
        let family = IpFamily::of(address);
        let here = self.node_ports.iter().filter(move |key| IpFamily::of(key.addr) == family);
        here.map(move |key| frontend_bit(&FrontendKey { addr: address, ..*key }))
    }

    /// Applies a successful `write` to the mirror.
    pub fn advance(&mut self, write: &Write, now: Instant, sync: u64) {
        match write {
            Write::Name(id, name) => {
                self.names.insert(*id, ShortName::from(&**name));
            }
            Write::NoName(id) => {
                self.names.remove(*id);
            }
            Write::Backend(id, row) => self.put_backend(*id, *row, now),
            Write::NoBackend(id, table) => {
                if let Some(row) =
                    self.backends.get(*id).filter(|row| Table::backends(row.addr) == *table).copied()
                {
                    self.backends.remove(*id);
                    self.active -= usize::from(row.state == BACKEND_ACTIVE);
                    self.prefilter.remove(backend_bit(&row), now);
                }
            }
            // The allocators know the content of extents and tables; what the programs write themselves is not mirrored.
            Write::Slots(..) | Write::MaglevTable(..) | Write::ResetHealth(..) => {}
            Write::MaglevIndex(index, row) => {
                let old = if row.is_empty() {
                    self.maglev.remove(index)
                } else {
                    self.maglev.insert(*index, row.clone())
                };
                let old = old.unwrap_or_default();
                for table in row.tables() {
                    self.tables.reference(table.base, table.words);
                }
                for table in old.tables() {
                    self.tables.release(table.base, table.words, now, sync);
                }
                self.drains.change(*index, &old.previous, &row.previous, now);
            }
            Write::Service(key, entry) => self.put_service(*key, *entry, now, sync),
            Write::NoService(key) => {
                if let Some(old) = self.services.remove(key) {
                    self.services6 -= usize::from(key.addr.is_ipv6());
                    self.addresses -= usize::from(is_address(key));
                    self.node_ports.remove(key);
                    self.unlink(key, &old, now, sync);
                    for bit in self.frontend_bits(key) {
                        self.prefilter.remove(bit, now);
                    }
                }
            }
            Write::PrefilterSet(..) | Write::PrefilterClear(..) => self.prefilter.written(write),
            Write::SourceRange(id, range) => self.ranges.put(*id, *range),
            Write::NoSourceRange(id, range) => self.ranges.take(*id, range),
            Write::Node(row) => {
                self.node.rows.insert(row.table(), (**row).clone());
            }
            Write::NodeAddr(address, bits) => self.put_address(*address, Some(*bits), now),
            Write::NoNodeAddr(address) => self.put_address(*address, None, now),
            Write::Device(index, bits) => {
                self.node.devices.insert(*index, *bits);
            }
            Write::NoDevice(index) => {
                self.node.devices.remove(index);
            }
            Write::Tunnel(number, row) => self.put_tunnel(*number, *row),
            Write::Config(row) => self.node.config = **row,
        }
    }

    fn put_tunnel(&mut self, number: u32, row: Option<TunnelRow>) {
        let old = match row {
            Some(row) => self.node.tunnels.insert(number, row),
            None => self.node.tunnels.remove(&number),
        };
        if let Some(old) = old.filter(|old| self.tunnels.get(&old.addr) == Some(&number)) {
            self.tunnels.remove(&old.addr);
        }
        if let Some(row) = row {
            self.tunnels.insert(row.addr, number);
        }
    }

    fn put_address(&mut self, address: IpAddr, bits: Option<NodeAddr>, now: Instant) {
        let old = match bits {
            Some(bits) => self.node.addresses.insert(address, bits),
            None => self.node.addresses.remove(&address),
        };
        let answers = |bits: Option<NodeAddr>| bits.is_some_and(|bits| bits & NODE_ADDR_PORTS != 0);
        if answers(old) == answers(bits) {
            return;
        }
        for bit in self.address_bits(address).collect::<Vec<_>>() {
            if answers(bits) {
                self.prefilter.add(bit);
            } else {
                self.prefilter.remove(bit, now);
            }
        }
    }

    fn put_backend(&mut self, id: u32, row: Backend, now: Instant) {
        self.prefilter.add(backend_bit(&row));
        self.active += usize::from(row.state == BACKEND_ACTIVE);
        if let Some(old) = self.backends.insert(id, row) {
            self.prefilter.remove(backend_bit(&old), now);
            self.active -= usize::from(old.state == BACKEND_ACTIVE);
        }
    }

    fn put_service(&mut self, key: FrontendKey, entry: ServiceEntry, now: Instant, sync: u64) {
        self.extents.reference(entry.slot_base, entry.slot_count);
        self.ranges.reference(entry.ranges, entry.id);
        self.by_load += usize::from(is_by_load(entry.algorithm));
        if let Some(old) = self.services.insert(key, entry) {
            self.unlink(&key, &old, now, sync);
        } else {
            for bit in self.frontend_bits(&key) {
                self.prefilter.add(bit);
            }
            if key.addr.is_unspecified() && key.port != 0 {
                self.node_ports.insert(key);
            }
            self.addresses += usize::from(is_address(&key));
            self.services6 += usize::from(key.addr.is_ipv6());
        }
        // Entries of addresses have the id 0 and belong to no Service port.
        if entry.id != 0 {
            self.frontends.get_or_default(entry.id).insert(key);
        }
    }

    fn unlink(&mut self, key: &FrontendKey, old: &ServiceEntry, now: Instant, sync: u64) {
        self.extents.release(old.slot_base, old.slot_count, now, sync);
        self.ranges.release(old.ranges, now, sync);
        self.by_load -= usize::from(is_by_load(old.algorithm));
        if let Some(keys) = self.frontends.get_mut(old.id) {
            keys.remove(key);
            if keys.is_empty() {
                self.frontends.remove(old.id);
            }
        }
    }
}

/// Whether the key stands for an address as such, and not for a frontend.
pub(super) const fn is_address(key: &FrontendKey) -> bool {
    key.port == 0 && key.proto == 0 && key.scope == SCOPE_INTERNAL
}

/// A previous table stays no longer than an idle TCP flow (`nf_conntrack_tcp_timeout_established` of kube-proxy): a connection without
/// a flow would otherwise be sent to an endpoint of tables that are older than the connection.
pub(super) const LONGEST: Duration = Duration::from_hours(24);

/// The drain periods of the previous tables.
#[derive(Clone, Debug)]
pub(super) struct Drains {
    /// By Service port and policy, and first word: when the table was replaced.
    since: BTreeMap<(u32, u32), Instant>,
    hold: Duration,
    /// All drain periods end with the next sync.
    ended: bool,
}

impl Drains {
    fn new(hold: Duration) -> Self {
        Self { since: BTreeMap::new(), hold, ended: false }
    }

    /// Returns how long a table stays.
    const fn hold(&self, is_scarce: bool) -> Duration {
        match (self.ended, is_scarce) {
            (true, _) => Duration::ZERO,
            (false, true) => self.hold,
            (false, false) => LONGEST,
        }
    }

    /// Notes that the previous tables of this index have changed from `old` to `new`.
    fn change(&mut self, index: u32, old: &[MaglevTable], new: &[MaglevTable], now: Instant) {
        for table in old.iter().filter(|table| !new.contains(table)) {
            self.since.remove(&(index, table.base));
        }
        for table in new {
            self.since.entry((index, table.base)).or_insert(now);
        }
        self.ended &= !self.since.is_empty();
    }

    /// Ends all drain periods with the next sync. `begins`: one begins in this sync.
    pub(super) fn end_all(&mut self, begins: bool) {
        self.ended = begins || !self.since.is_empty();
    }

    /// Returns the indexes and first words of the tables that leave: those whose drain period is over, or all. `is_scarce`: whether
    /// the map is more than half full.
    pub(super) fn over(&self, is_scarce: bool, now: Instant) -> BTreeSet<(u32, u32)> {
        let hold = self.hold(is_scarce);
        let is_over = |since: Instant| since + hold <= now;
        self.since.iter().filter(|(_, since)| is_over(**since)).map(|(table, _)| *table).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_all_drain_periods_concerns_no_later_table() {
        let (now, hold) = (Instant::now(), Duration::from_mins(10));
        let table = MaglevTable { base: 7, words: 9, signature: 1 };
        let mut drains = Drains::new(hold);
        // No table is there to leave.
        drains.end_all(false);
        drains.change(3, &[], &[table], now);
        assert!(drains.over(true, now).is_empty());
        drains.end_all(false);
        assert_eq!(drains.over(true, now), [(3, 7)].into());
    }
}
