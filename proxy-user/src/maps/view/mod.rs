//! Reads the pinned maps, in any process that may open them: the command line, the metrics, a script.
//!
//! A [`View`] needs no agent. It opens each pin anew for each question, so that it sees what the programs see. It only
//! reads, except for [`View::listen`], [`View::recount`], [`View::correct`], [`View::mark_flows`], [`View::move_flows`]
//! and [`View::delete_flows`]. The programs and the agent continue meanwhile: each row is correct by itself, and rows that
//! belong together are checked against each other where possible (a backend contains the id of its Service).

mod delete;
mod dump;
mod error;
mod flow_row;
mod flow_use;
mod flows;
mod health;
mod latency;
mod listen;
mod load;
mod moves;
mod pin;
mod removal;
mod ring;
mod rows;
mod rules;
mod sockets;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::maps::family::MapFamily;
use crate::maps::sys;
use aya::maps::{MapType, PerCpuArray, PerCpuValues};
use ipnet::IpNet;
use proxy_common::Address as _;
use proxy_common::backend::BACKEND_FREE;
use proxy_common::config::NodeConfig;
use proxy_common::latency::LatencyEntry;
use proxy_common::map_names as map;
use proxy_common::name::PortName;
use proxy_common::node::{Cidr, NodeAddr, NodeEntry};
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_ADDRESS, KIND_UNMANAGED, ServiceEntry, ServiceKey};
use proxy_common::stats::{RefusalKey, ServiceStats};
use proxy_common::version::ABI_VERSION;

pub use delete::Claimed;
pub use dump::Entry;
pub use error::ViewError;
pub use flow_row::{FlowCounts, FlowRow, Forwarding};
pub use flows::monotonic;
pub(super) use flows::{not_before, now};
pub use latency::Example;
pub use listen::{EventHistory, LastEvents, Listener};
pub use load::Counted;
pub use moves::{FlowId, MovableFlow, RebalancedPort};
pub use rows::{BackendRow, BackendState, FrontendRow, FrontendRowKind, NameRow, Transport, UnmanagedRow};
pub use rules::{Common, Rules};
pub use sockets::{ServingEndpoints, StaleSocket};
pub use usage::UsageRow;

/// Ballast's folder below the bpffs.
pub const FOLDER: &str = "ballast";

/// The maps that are pinned on one bpffs.
#[derive(Clone, Debug)]
pub struct View {
    maps: PathBuf,
}

/// All information in the maps, read once.
#[derive(Clone, Debug, Default)]
pub struct Overview {
    /// Services, endpoints, and their counters.
    pub snapshot: Snapshot,
    /// Numbers of flows.
    pub flows: FlowCounts,
    /// Maps, in the order of [`map::ALL`].
    pub maps: Vec<UsageRow>,
    /// Counter of each reason.
    pub reasons: BTreeMap<Reason, u64>,
}

/// All information about Services, read at once.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Service ports, by id.
    pub names: BTreeMap<u32, NameRow>,
    /// Frontends, in order of id and address.
    pub frontends: Vec<FrontendRow>,
    /// Numbers of other entries, which are only about an address, of IPv4 and of IPv6.
    pub addresses: [usize; 2],
    /// Unmanaged addresses, in order.
    pub unmanaged: Vec<UnmanagedRow>,
    /// Endpoints, by id.
    pub backends: BTreeMap<u32, BackendRow>,
    /// Counters of a Service port, by its id, over all CPUs.
    pub service_stats: BTreeMap<u32, ServiceStats>,
    /// Connections counted for an endpoint, by its id.
    pub backend_stats: BTreeMap<u32, u64>,
    /// Endpoints that new connections skip, by id, with the remaining seconds.
    pub ejected: BTreeMap<u32, u32>,
    /// Open flows of removed endpoints, by the endpoint's id; endpoints without such flows are left out.
    pub left: BTreeMap<u32, u64>,
    /// Open connections of endpoints, where the Service counts them, by the endpoint's id.
    pub open_connections: BTreeMap<u32, u64>,
    /// Ids of Service ports whose algorithm uses open connections.
    pub by_load: BTreeSet<u32>,
    /// Counters of refusals, by the id of the Service port and the reason.
    pub refusals: BTreeMap<(u32, Reason), u64>,
    /// How long endpoints take to answer, as [`View::latency`] returns it.
    pub latency: BTreeMap<(u32, u32), LatencyEntry>,
}

/// The contents of `services` and `services6`.
struct FrontendRows {
    rows: Vec<FrontendRow>,
    /// Numbers of other entries, which are only about an address, of IPv4 and of IPv6.
    addresses: [usize; 2],
    /// Unmanaged addresses, in order.
    unmanaged: Vec<IpAddr>,
}

impl View {
    /// Finds Ballast's pins below the bpffs that is mounted at `bpffs`.
    pub fn open(bpffs: &Path) -> Result<Self, ViewError> {
        let root = bpffs.join(FOLDER);
        let maps = root.join(format!("v{ABI_VERSION}"));
        match maps.metadata() {
            Ok(_) => Ok(Self { maps }),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(ViewError::Denied { path: maps }),
            Err(_) => Err(other_version(bpffs, &root)),
        }
    }

    /// The folder of the maps.
    pub fn folder(&self) -> &Path {
        &self.maps
    }

    /// Returns the frontends, in order of id and address, with the ids of the backends of each. Entries that are only about
    /// an address are left out.
    pub fn services(&self) -> Result<Vec<FrontendRow>, ViewError> {
        self.frontend_rows().map(|frontends| frontends.rows)
    }

    /// Returns the frontends, and the entries that [`View::services`] leaves out.
    fn frontend_rows(&self) -> Result<FrontendRows, ViewError> {
        let mut entries = self.frontends::<[u8; 4]>()?;
        let mut entries6 = self.frontends::<[u8; 16]>()?;
        let mut unmanaged = Vec::new();
        let addresses = [&mut entries, &mut entries6].map(|entries| {
            let before = entries.len();
            let is_left_alone = |(_, entry): &&(FrontendRow, ServiceEntry)| entry.kind == KIND_UNMANAGED;
            unmanaged.extend(entries.iter().filter(is_left_alone).map(|(row, _)| row.address));
            entries.retain(|(_, entry)| ![KIND_ADDRESS, KIND_UNMANAGED].contains(&entry.kind));
            before - entries.len()
        });
        entries.extend(entries6);
        let slots = self.pin(map::SLOTS, MapType::Array)?.mapped::<u32>()?;
        let mut rows: Vec<_> = entries
            .into_iter()
            .map(|(row, entry)| {
                let first = (entry.slot_base as usize).min(slots.len());
                let end = first.saturating_add(entry.slot_count as usize).min(slots.len());
                let mut met = BTreeSet::new();
                let backends = (first..end).filter_map(|slot| slots.read(slot)).filter(|id| met.insert(*id));
                FrontendRow { backends: backends.collect(), slots: entry.slot_count, ..row }
            })
            .collect();
        rows.sort_by_key(|row| (row.service, row.kind, row.address, row.port, row.scope));
        unmanaged.sort_unstable();
        Ok(FrontendRows { rows, addresses, unmanaged })
    }

    /// Returns why these addresses are unmanaged: the node has them itself, or another proxy serves them.
    fn unmanaged(&self, addresses: Vec<IpAddr>) -> Result<Vec<UnmanagedRow>, ViewError> {
        if addresses.is_empty() {
            return Ok(Vec::new());
        }
        let own = self.node_addresses()?;
        let row = |address| UnmanagedRow { address, is_own: own.contains_key(&address) };
        Ok(addresses.into_iter().map(row).collect())
    }

    /// Returns the addresses in `node_addrs` and `node_addrs6`, with their `NODE_ADDR_*` bits.
    pub fn node_addresses(&self) -> Result<BTreeMap<IpAddr, NodeAddr>, ViewError> {
        let (v4, v6) = (self.node_addrs::<[u8; 4]>()?, self.node_addrs::<[u8; 16]>()?);
        let v4 = v4.into_iter().map(|(address, bits)| (IpAddr::from(address), bits));
        Ok(v4.chain(v6.into_iter().map(|(address, bits)| (address.into(), bits))).collect())
    }

    fn node_addrs<A: MapFamily>(&self) -> Result<Vec<(A, NodeAddr)>, ViewError> {
        self.pin(A::NODE_ADDRS, MapType::Hash)?.all()
    }

    /// Returns the ranges of Service addresses, whose unused addresses and ports are refused; those of IPv4 first.
    pub fn service_cidrs(&self) -> Result<Vec<IpNet>, ViewError> {
        let (v4, v6) = (self.cidrs_of::<[u8; 4]>()?, self.cidrs_of::<[u8; 16]>()?);
        Ok([v4, v6].concat())
    }

    fn cidrs_of<A: MapFamily>(&self) -> Result<Vec<IpNet>, ViewError> {
        let rows = self.pin(A::NODE, MapType::Array)?.first::<u32, NodeEntry<A>>(1)?;
        let used = |node: NodeEntry<A>| node.service_cidrs.into_iter().take(node.service_cidr_count as usize);
        let net = |cidr: Cidr<A>| IpNet::with_netmask(cidr.addr.into(), cidr.mask.into()).ok();
        Ok(rows.into_iter().flat_map(|(_, node)| used(node)).filter_map(net).collect())
    }

    fn frontends<A: MapFamily>(&self) -> Result<Vec<(FrontendRow, ServiceEntry)>, ViewError> {
        let entries = self.pin(A::SERVICES, MapType::Hash)?.all::<ServiceKey<A>, ServiceEntry>()?;
        Ok(entries.into_iter().map(|(key, entry)| (FrontendRow::of(key, &entry), entry)).collect())
    }

    /// Returns the names of Service ports, by id.
    pub fn names(&self) -> Result<BTreeMap<u32, NameRow>, ViewError> {
        let rows = self.pin(map::NAMES, MapType::Hash)?.all::<u32, PortName>()?;
        Ok(rows.into_iter().map(|(id, name)| (id, NameRow::of(&name))).collect())
    }

    /// Reads the part of the maps that the names of Services need: names, and the ports of frontends.
    pub fn service_names(&self) -> Result<Snapshot, ViewError> {
        Ok(Snapshot { names: self.names()?, frontends: self.services()?, ..Snapshot::default() })
    }

    /// Returns the endpoints in use or quarantined, by id.
    pub fn backends(&self) -> Result<BTreeMap<u32, BackendRow>, ViewError> {
        let mut rows = self.endpoints::<[u8; 4]>()?;
        rows.extend(self.endpoints::<[u8; 16]>()?);
        Ok(rows)
    }

    fn endpoints<A: MapFamily>(&self) -> Result<BTreeMap<u32, BackendRow>, ViewError> {
        let rows = self.rows::<A>(|state| state != BACKEND_FREE)?;
        Ok(rows.into_iter().filter_map(|(id, row)| Some((id, BackendRow::of(row)?))).collect())
    }

    /// Returns the counters of these Service ports, over all CPUs.
    pub fn service_stats(
        &self,
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<BTreeMap<u32, ServiceStats>, ViewError> {
        let pin = self.pin(map::SERVICE_STATS, MapType::PerCpuArray)?.checked::<u32, ServiceStats>()?;
        let ids: BTreeSet<u32> = ids.into_iter().collect();
        let end = ids.last().map_or(0, |id| id.saturating_add(1));
        let mut rows = BTreeMap::new();
        // As for `backend_stats`.
        if ids.len() < end as usize / 8 {
            let (segments, per) = pin.segments();
            let arrays: Vec<_> =
                segments.iter().map(|segment| pin.per_cpu(segment)).collect::<Result<_, _>>()?;
            for id in ids {
                let Some(array) = arrays.get((id / per) as usize) else { continue };
                let values: PerCpuValues<ServiceStats> = pin.element(array.get(&(id % per), 0))?;
                rows.insert(id, values.iter().fold(ServiceStats::default(), add));
            }
            return Ok(rows);
        }
        pin.first_per_cpu(end, |id, values: &[ServiceStats]| {
            if ids.contains(&id) {
                rows.insert(id, values.iter().fold(ServiceStats::default(), add));
            }
        })?;
        Ok(rows)
    }

    /// Returns the connections counted for these backends.
    pub fn backend_stats(&self, ids: &BTreeSet<u32>) -> Result<BTreeMap<u32, u64>, ViewError> {
        let end = ids.last().map_or(0, |id| id.saturating_add(1));
        let pin = self.pin(map::BACKEND_STATS, MapType::Array)?.checked::<u32, u64>()?;
        // A batch reads every id up to the highest one; reading a single id costs about as much as eight ids of a batch.
        if ids.len() < end as usize / 8 {
            let one = |id: &u32| pin.elements::<u64>(*id..id.saturating_add(1));
            let rows: Vec<_> = ids.iter().map(one).collect::<Result<_, _>>()?;
            return Ok(rows.into_iter().flatten().collect());
        }
        let rows = pin.elements::<u64>(0..end)?;
        Ok(rows.into_iter().filter(|(id, _)| ids.contains(id)).collect())
    }

    /// Returns the counters of all reasons, over all CPUs.
    pub fn reasons(&self) -> Result<BTreeMap<Reason, u64>, ViewError> {
        let pin = self.pin(map::REASONS, MapType::PerCpuArray)?.checked::<u32, u64>()?;
        let (segments, _) = pin.segments();
        let array: PerCpuArray<_, u64> = pin.per_cpu(&segments[0])?;
        let mut rows = BTreeMap::new();
        for reason in Reason::ALL {
            // An agent that knew fewer reasons may have created the map.
            let count = if (*reason as u32) < array.len() {
                pin.element(array.get(&(*reason as u32), 0))?.iter().sum()
            } else {
                0
            };
            rows.insert(*reason, count);
        }
        Ok(rows)
    }

    /// Returns the counters of refusals, by the id of the Service port and the reason.
    pub fn refusals(&self) -> Result<BTreeMap<(u32, Reason), u64>, ViewError> {
        let rows = self.pin(map::REFUSALS, MapType::LruHash)?.all::<RefusalKey, u64>()?;
        Ok(rows
            .into_iter()
            .filter_map(|(key, count)| Some(((key.service, Reason::from_number(key.reason)?), count)))
            .collect())
    }

    /// Returns the settings of the programs on this node; `abi` is 0 before the agent has written them.
    pub fn node_config(&self) -> Result<NodeConfig, ViewError> {
        let pin = self.pin(map::CONFIG, MapType::Array)?;
        let rows = pin.first::<u32, NodeConfig>(1)?;
        Ok(rows.into_iter().next().map(|(_, config)| config).unwrap_or_default())
    }

    /// Reads everything about Services.
    pub fn snapshot(&self) -> Result<Snapshot, ViewError> {
        let names = self.names()?;
        let FrontendRows { rows: frontends, addresses, unmanaged } = self.frontend_rows()?;
        let backends = self.backends()?;
        let ids: BTreeSet<u32> =
            names.keys().copied().chain(frontends.iter().map(|row| row.service)).collect();
        Ok(Snapshot {
            service_stats: self.service_stats(ids)?,
            backend_stats: self.backend_stats(&backends.keys().copied().collect())?,
            ejected: self.ejected()?,
            left: self.flows_of_left()?,
            by_load: frontends.iter().filter(|row| row.by_load).map(|row| row.service).collect(),
            open_connections: self.open_connections(backends.keys().copied())?,
            refusals: self.refusals()?,
            latency: self.latency()?,
            names,
            frontends,
            addresses,
            unmanaged: self.unmanaged(unmanaged)?,
            backends,
        })
    }

    /// Reads everything, each map once.
    pub fn overview(&self) -> Result<Overview, ViewError> {
        let (snapshot, flows) = (self.snapshot()?, self.flow_counts()?);
        let maps = self.usage_of(&snapshot, &flows)?;
        Ok(Overview { snapshot, flows, maps, reasons: self.reasons()? })
    }

    fn pin(&self, name: &'static str, kind: MapType) -> Result<pin::Pin, ViewError> {
        pin::Pin::open(&self.maps, name, kind)
    }
}

/// Converts an address from words in memory order, as programs keep it; `None` if the family is neither 4 nor 6. An IPv4
/// address is in the first word.
pub fn ip_of(family: u32, words: [u32; 4]) -> Option<IpAddr> {
    match family {
        4 => Some(<[u8; 4]>::from_words(words).into()),
        6 => Some(<[u8; 16]>::from_words(words).into()),
        _ => None,
    }
}

/// Returns the reason why there is no folder of this version.
fn other_version(bpffs: &Path, root: &Path) -> ViewError {
    let found = root.read_dir().into_iter().flatten().flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix('v').and_then(|number| number.parse().ok())
    });
    match found {
        Some(found) => ViewError::OtherVersion { root: root.to_owned(), found, expected: ABI_VERSION },
        None if sys::is_bpffs(bpffs) => ViewError::Nothing { bpffs: bpffs.to_owned() },
        None => ViewError::NoBpffs { path: bpffs.to_owned() },
    }
}

fn add(sum: ServiceStats, one: &ServiceStats) -> ServiceStats {
    ServiceStats {
        connections: sum.connections.wrapping_add(one.connections),
        packets: sum.packets.wrapping_add(one.packets),
        bytes: sum.bytes.wrapping_add(one.bytes),
        reply_packets: sum.reply_packets.wrapping_add(one.reply_packets),
        reply_bytes: sum.reply_bytes.wrapping_add(one.reply_bytes),
    }
}

#[cfg(test)]
mod tests;
