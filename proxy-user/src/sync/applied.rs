//! What is in the maps, as far as we know: it changes only after the write it mirrors succeeded.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::name::PortName;
use proxy_common::service::ServiceEntry;

use super::extents::Extents;
use super::filter::{Filter, backend_bit, frontend_bit};
use super::ids::Ids;
use crate::maps::{Backend, Capacity, FrontendKey, Table, Write};
use crate::plan::{BackendAddress, PortId};

/// How long things rest before they are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holds {
    /// A replaced extent of slots: longer than any program runs.
    pub extent: Duration,
    /// The id of an endpoint or of a Service port.
    pub id: Duration,
    /// A bit of the filter: as long as a silent TCP flow is remembered.
    pub filter: Duration,
}

impl Default for Holds {
    fn default() -> Self {
        Self { extent: Duration::from_secs(1), id: Duration::from_mins(1), filter: Duration::from_hours(24) }
    }
}

/// An endpoint of the Service port of this id.
pub type BackendKey = (u32, BackendAddress);

/// The mirror of the tables, and who owns which number in them.
#[derive(Clone, Debug)]
pub struct Applied {
    pub services: BTreeMap<FrontendKey, ServiceEntry>,
    pub frontends: BTreeMap<u32, BTreeSet<FrontendKey>>,
    pub backends: BTreeMap<u32, Backend>,
    pub names: BTreeMap<u32, PortName>,
    pub filter: Filter,
    pub extents: Extents,
    /// Ids of Service ports.
    pub ports: Ids<PortId>,
    /// Ids of endpoints.
    pub endpoints: Ids<BackendKey>,
    /// Endpoints that serve.
    pub active: usize,
    /// IPv6 frontends.
    pub services6: usize,
}

impl Applied {
    pub fn new(capacity: Capacity, holds: Holds) -> Self {
        Self {
            services: BTreeMap::new(),
            frontends: BTreeMap::new(),
            backends: BTreeMap::new(),
            names: BTreeMap::new(),
            filter: Filter::new(holds.filter),
            extents: Extents::new(capacity.slots, holds.extent),
            ports: Ids::new(capacity.services, holds.id),
            endpoints: Ids::new(capacity.backends, holds.id),
            active: 0,
            services6: 0,
        }
    }

    /// The endpoints of a Service port that have ids, resting or not.
    pub fn endpoints_of(&self, service: u32) -> impl Iterator<Item = (&BackendKey, u32)> {
        let first = BackendAddress { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), port: 0 };
        self.endpoints.range((service, first)..(service.saturating_add(1), first))
    }

    /// The frontends whose entries carry this id.
    pub fn frontends_of(&self, service: u32) -> impl Iterator<Item = &FrontendKey> {
        self.frontends.get(&service).into_iter().flatten()
    }

    /// Notes that `write` is done.
    pub fn advance(&mut self, write: &Write, now: Instant, sync: u64) {
        match write {
            Write::Name(id, name) => {
                self.names.insert(*id, **name);
            }
            Write::NoName(id) => {
                self.names.remove(id);
            }
            Write::Backend(id, row) => self.put_backend(*id, *row, now),
            Write::NoBackend(id, table) => {
                if let Some(row) =
                    self.backends.get(id).filter(|row| Table::backends(row.addr) == *table).copied()
                {
                    self.backends.remove(id);
                    self.active -= usize::from(row.state == BACKEND_ACTIVE);
                    self.filter.remove(backend_bit(&row), now);
                }
            }
            // The allocator knows what it handed out.
            Write::Slots(..) => {}
            Write::Service(key, entry) => self.put_service(*key, *entry, now, sync),
            Write::NoService(key) => {
                if let Some(old) = self.services.remove(key) {
                    self.services6 -= usize::from(key.addr.is_ipv6());
                    self.unlink(key, &old, now, sync);
                    self.filter.remove(frontend_bit(key), now);
                }
            }
            Write::FilterSet(..) | Write::FilterClear(..) => self.filter.written(write),
        }
    }

    fn put_backend(&mut self, id: u32, row: Backend, now: Instant) {
        self.filter.add(backend_bit(&row));
        self.active += usize::from(row.state == BACKEND_ACTIVE);
        if let Some(old) = self.backends.insert(id, row) {
            self.filter.remove(backend_bit(&old), now);
            self.active -= usize::from(old.state == BACKEND_ACTIVE);
        }
    }

    fn put_service(&mut self, key: FrontendKey, entry: ServiceEntry, now: Instant, sync: u64) {
        self.extents.reference(entry.slot_base, entry.slot_count);
        if let Some(old) = self.services.insert(key, entry) {
            self.unlink(&key, &old, now, sync);
        } else {
            self.filter.add(frontend_bit(&key));
            self.services6 += usize::from(key.addr.is_ipv6());
        }
        self.frontends.entry(entry.id).or_default().insert(key);
    }

    fn unlink(&mut self, key: &FrontendKey, old: &ServiceEntry, now: Instant, sync: u64) {
        self.extents.release(old.slot_base, old.slot_count, now, sync);
        if let Some(keys) = self.frontends.get_mut(&old.id) {
            keys.remove(key);
            if keys.is_empty() {
                self.frontends.remove(&old.id);
            }
        }
    }
}
