//! Rows of the tables, for both address families.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use proxy_common::backend::{BACKEND_FREE, BackendEntry};
use proxy_common::map_names as map;
use proxy_common::name::PortName;
use proxy_common::node::{Device, NodeAddr};
use proxy_common::service::{SCOPE_EXTERNAL, ServiceEntry, ServiceKey};

use super::maglev::MaglevRow;
use super::node::{ConfigRow, NodeRow, TunnelRow};
use super::table::Table;

/// Number of entries that each table can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Entries in each of `services` and `services6`.
    pub frontends: u32,
    /// Elements of `slots`.
    pub slots: u32,
    /// Elements of `maglev`.
    pub maglev: u32,
    /// Elements of `backends` (and of `backends6`): ids run from 1 to one less.
    pub backends: u32,
    /// Entries in `names` and elements of `service_stats`: ids run from 1 to one less.
    pub services: u32,
    /// Entries in each of `src_ranges` and `src_ranges6`.
    pub ranges: u32,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            frontends: map::DEFAULT_FRONTENDS,
            slots: map::DEFAULT_SLOTS,
            maglev: map::DEFAULT_MAGLEV_WORDS,
            backends: map::DEFAULT_BACKENDS,
            services: map::DEFAULT_SERVICES,
            ranges: map::DEFAULT_SRC_RANGES,
        }
    }
}

/// Key of `services` and `services6`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendKey {
    /// Frontend address; the unspecified address means "any address of this node".
    pub addr: IpAddr,
    /// Frontend port.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// A `SCOPE_*` number.
    pub scope: u8,
}

impl FrontendKey {
    /// Returns the value that [`ServiceEntry::tag`] of its entry must have.
    pub fn tag(&self) -> u32 {
        match self.addr {
            IpAddr::V4(addr) => self.with(addr.octets()).tag(),
            IpAddr::V6(addr) => self.with(addr.octets()).tag(),
        }
    }

    /// Returns the key in the map of a family, with the same address in the form of that family.
    pub fn with<A>(&self, addr: A) -> ServiceKey<A> {
        ServiceKey { addr, port: self.port, proto: self.proto, scope: self.scope }
    }
}

impl<A: proxy_common::Address + Into<IpAddr>> From<ServiceKey<A>> for FrontendKey {
    fn from(key: ServiceKey<A>) -> Self {
        Self { addr: key.addr.into(), port: key.port, proto: key.proto, scope: key.scope }
    }
}

impl fmt::Display for FrontendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, port, proto, scope } = *self;
        match addr {
            IpAddr::V4(addr) => write!(f, "{addr}:{port}")?,
            IpAddr::V6(addr) => write!(f, "[{addr}]:{port}")?,
        }
        match proto {
            proxy_common::PROTO_TCP => f.write_str("/TCP")?,
            proxy_common::PROTO_UDP => f.write_str("/UDP")?,
            proxy_common::PROTO_SCTP => f.write_str("/SCTP")?,
            other => write!(f, "/{other}")?,
        }
        if scope == SCOPE_EXTERNAL { f.write_str(" (external)") } else { Ok(()) }
    }
}

/// Value of `backends` and `backends6`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Endpoint address.
    pub addr: IpAddr,
    /// Endpoint port.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// A `BACKEND_*` state other than free.
    pub state: u8,
    /// Id of the Service port.
    pub service: u32,
    /// `BACKEND_*` flag bits.
    pub flags: u32,
}

impl Backend {
    /// Returns the element in the map of a family, with the same address in the form of that family.
    pub fn with<A>(&self, addr: A) -> BackendEntry<A> {
        let Self { port, proto, state, service, flags, .. } = *self;
        BackendEntry { addr, port, proto, state, service, flags }
    }

    /// Reads an entry; `None` for a free id.
    pub fn from_entry<A: proxy_common::Address + Into<IpAddr>>(entry: BackendEntry<A>) -> Option<Self> {
        let BackendEntry { addr, port, proto, state, service, flags } = entry;
        (state != BACKEND_FREE).then(|| Self { addr: addr.into(), port, proto, state, service, flags })
    }
}

/// One change, which readers of the maps see as a whole, except for [`Write::Slots`] and [`Write::MaglevTable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Sets the name of a Service port.
    Name(u32, Box<PortName>),
    /// Removes the name of a Service port.
    NoName(u32),
    /// Sets the backend of an id.
    Backend(u32, Backend),
    /// Resets the health of an id ([`proxy_common::health`]): to a newcomer's, if one of these endpoints has answered.
    ResetHealth(u32, Table, Arc<[u32]>),
    /// Frees an id; the table gives the family.
    NoBackend(u32, Table),
    /// Fills an extent from this slot on. Nothing may refer to the extent yet.
    Slots(u32, Vec<u32>),
    /// Writes a Maglev table from this word on. Nothing may refer to the table yet.
    MaglevTable(u32, Vec<u64>),
    /// Sets the tables of a Service port and policy ([`proxy_common::maglev::index`]), or removes them (bases of 0).
    MaglevIndex(u32, MaglevRow),
    /// Sets the entry of a frontend: the commit of a change.
    Service(FrontendKey, ServiceEntry),
    /// Removes a frontend.
    NoService(FrontendKey),
    /// Sets the bits of a mask in a word of the prefilter.
    PrefilterSet(u32, u64),
    /// Clears the bits of a mask in a word of the prefilter.
    PrefilterClear(u32, u64),
    /// Adds a range to the set of source ranges with this id.
    SourceRange(u32, IpNet),
    /// Removes a range from a set of source ranges.
    NoSourceRange(u32, IpNet),
    /// Sets the row of this node, in the family of the row.
    Node(Box<NodeRow>),
    /// Adds an address of this node, with `NODE_ADDR_*` bits.
    NodeAddr(IpAddr, NodeAddr),
    /// Removes an address of this node.
    NoNodeAddr(IpAddr),
    /// Sets the node that has a number, or frees the number.
    Tunnel(u32, Option<TunnelRow>),
    /// Sets the `DEVICE_*` bits of a device, by its index.
    Device(u32, Device),
    /// Removes a device.
    NoDevice(u32),
    /// Changes the settings that a sync writes; the others stay.
    Config(Box<ConfigRow>),
}

impl Write {
    /// Returns the table of the write.
    pub const fn table(&self) -> Table {
        match self {
            Self::Name(..) | Self::NoName(_) => Table::Names,
            Self::Backend(_, row) => Table::backends(row.addr),
            Self::NoBackend(_, table) | Self::ResetHealth(_, table, _) => *table,
            Self::Slots(..) => Table::Slots,
            Self::MaglevTable(..) | Self::MaglevIndex(..) => Table::Maglev,
            Self::Service(key, _) | Self::NoService(key) => Table::services(key.addr),
            Self::PrefilterSet(..) | Self::PrefilterClear(..) => Table::Prefilter,
            Self::SourceRange(_, range) | Self::NoSourceRange(_, range) => Table::source_ranges(*range),
            Self::Node(row) => row.table(),
            Self::NodeAddr(address, _) | Self::NoNodeAddr(address) => Table::node_addrs(*address),
            Self::Tunnel(..) => Table::Tunnels,
            Self::Device(..) | Self::NoDevice(_) => Table::Devices,
            Self::Config(_) => Table::Config,
        }
    }

    /// Whether the write removes something.
    pub const fn removes(&self) -> bool {
        matches!(
            self,
            Self::NoName(_)
                | Self::NoBackend(..)
                | Self::NoService(_)
                | Self::PrefilterClear(..)
                | Self::NoSourceRange(..)
                | Self::NoNodeAddr(_)
                | Self::NoDevice(_)
                | Self::Tunnel(_, None)
        )
    }

    /// Describes the entry for error messages.
    pub fn subject(&self) -> String {
        match self {
            Self::Name(id, name) => format!("{} (id {id})", name.as_str()),
            Self::Backend(id, row) => format!("{} port {} (id {id})", row.addr, row.port),
            Self::NoName(id) | Self::NoBackend(id, _) | Self::ResetHealth(id, ..) => format!("id {id}"),
            Self::MaglevTable(base, words) => format!("{} words from {base}", words.len()),
            Self::MaglevIndex(index, _) => format!("the table of id {}", index / 2),
            Self::Slots(base, ids) => format!("{} slots from {base}", ids.len()),
            Self::Service(key, _) | Self::NoService(key) => key.to_string(),
            Self::PrefilterSet(word, mask) | Self::PrefilterClear(word, mask) => {
                format!("bit {mask:#x} of word {word}")
            }
            Self::SourceRange(id, range) | Self::NoSourceRange(id, range) => format!("{range} of set {id}"),
            Self::Node(_) | Self::Config(_) => "its only entry".to_owned(),
            Self::NodeAddr(address, _) | Self::NoNodeAddr(address) => address.to_string(),
            Self::Tunnel(number, row) => row
                .map_or_else(|| format!("number {number}"), |row| format!("{} (number {number})", row.addr)),
            Self::Device(index, _) | Self::NoDevice(index) => format!("device {index}"),
        }
    }
}
