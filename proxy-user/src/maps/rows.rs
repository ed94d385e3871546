//! Rows of the tables, for both address families.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proxy_common::backend::{BACKEND_FREE, BackendEntry};
use proxy_common::map_names as map;
use proxy_common::name::PortName;
use proxy_common::service::{SCOPE_EXTERNAL, ServiceEntry, ServiceKey};

/// A map that this module writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// IPv4 frontends.
    Services,
    /// IPv6 frontends.
    Services6,
    /// Extents of backend ids.
    Slots,
    /// IPv4 endpoints.
    Backends,
    /// IPv6 endpoints.
    Backends6,
    /// The bitmap that lets foreign packets leave.
    Filter,
    /// Names of Service ports.
    Names,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Services,
        Self::Services6,
        Self::Slots,
        Self::Backends,
        Self::Backends6,
        Self::Filter,
        Self::Names,
    ];

    /// The table of frontends at such an address.
    pub const fn services(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Services,
            IpAddr::V6(_) => Self::Services6,
        }
    }

    /// The table of endpoints at such an address.
    pub const fn backends(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Backends,
            IpAddr::V6(_) => Self::Backends6,
        }
    }

    /// The name of the map.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Services => map::SERVICES,
            Self::Services6 => map::SERVICES6,
            Self::Slots => map::SLOTS,
            Self::Backends => map::BACKENDS,
            Self::Backends6 => map::BACKENDS6,
            Self::Filter => map::FILTER,
            Self::Names => map::NAMES,
        }
    }

    /// The flag that makes it larger; empty where nothing does.
    pub const fn setting(self) -> &'static str {
        match self {
            Self::Services | Self::Services6 => "--max-frontends",
            Self::Slots => "--max-slots",
            Self::Backends | Self::Backends6 => "--max-backends",
            Self::Names => "--max-services",
            Self::Filter => "",
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How many entries each table takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Entries in each of `services` and `services6`.
    pub frontends: u32,
    /// Elements of `slots`.
    pub slots: u32,
    /// Elements of `backends` (and of `backends6`): ids run from 1 to one less.
    pub backends: u32,
    /// Entries in `names` and elements of `service_stats`: ids run from 1 to one less.
    pub services: u32,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            frontends: map::DEFAULT_FRONTENDS,
            slots: map::DEFAULT_SLOTS,
            backends: map::DEFAULT_BACKENDS,
            services: map::DEFAULT_SERVICES,
        }
    }
}

/// Key of `services` and `services6`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendKey {
    /// Frontend address; unspecified is "any address of this node".
    pub addr: IpAddr,
    /// Frontend port.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// A `SCOPE_*` number.
    pub scope: u8,
}

impl FrontendKey {
    /// What [`ServiceEntry::tag`] of its entry must be.
    pub fn tag(&self) -> u32 {
        match self.addr {
            IpAddr::V4(addr) => self.v4(addr).tag(),
            IpAddr::V6(addr) => self.v6(addr).tag(),
        }
    }

    pub(super) fn v4(&self, addr: Ipv4Addr) -> ServiceKey<[u8; 4]> {
        ServiceKey { addr: addr.octets(), port: self.port, proto: self.proto, scope: self.scope }
    }

    pub(super) fn v6(&self, addr: Ipv6Addr) -> ServiceKey<[u8; 16]> {
        ServiceKey { addr: addr.octets(), port: self.port, proto: self.proto, scope: self.scope }
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
    pub(super) fn v4(&self, addr: Ipv4Addr) -> BackendEntry<[u8; 4]> {
        let Self { port, proto, state, service, flags, .. } = *self;
        BackendEntry { addr: addr.octets(), port, proto, state, service, flags }
    }

    pub(super) fn v6(&self, addr: Ipv6Addr) -> BackendEntry<[u8; 16]> {
        let Self { port, proto, state, service, flags, .. } = *self;
        BackendEntry { addr: addr.octets(), port, proto, state, service, flags }
    }

    /// `None` for a free id.
    pub(super) fn from_entry<A: proxy_common::Address + Into<IpAddr>>(
        entry: BackendEntry<A>,
    ) -> Option<Self> {
        let BackendEntry { addr, port, proto, state, service, flags } = entry;
        (state != BACKEND_FREE).then(|| Self { addr: addr.into(), port, proto, state, service, flags })
    }
}

/// One step that a reader of the maps sees as a whole, except for [`Write::Slots`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Names a Service port.
    Name(u32, Box<PortName>),
    /// Takes the name away.
    NoName(u32),
    /// Sets the backend of an id.
    Backend(u32, Backend),
    /// Frees an id; the table says in which family.
    NoBackend(u32, Table),
    /// Fills an extent from this slot on. Nothing may refer to it yet.
    Slots(u32, Vec<u32>),
    /// Makes a frontend go somewhere: the commit of a change.
    Service(FrontendKey, ServiceEntry),
    /// Removes a frontend.
    NoService(FrontendKey),
    /// Sets the bits of a mask in a word of the filter.
    FilterSet(u32, u64),
    /// Clears them.
    FilterClear(u32, u64),
}

impl Write {
    /// The table it goes to.
    pub const fn table(&self) -> Table {
        match self {
            Self::Name(..) | Self::NoName(_) => Table::Names,
            Self::Backend(_, row) => Table::backends(row.addr),
            Self::NoBackend(_, table) => *table,
            Self::Slots(..) => Table::Slots,
            Self::Service(key, _) | Self::NoService(key) => Table::services(key.addr),
            Self::FilterSet(..) | Self::FilterClear(..) => Table::Filter,
        }
    }

    /// Whether it takes something away.
    pub const fn removes(&self) -> bool {
        matches!(self, Self::NoName(_) | Self::NoBackend(..) | Self::NoService(_) | Self::FilterClear(..))
    }

    /// The entry in words of people, for errors.
    pub fn subject(&self) -> String {
        match self {
            Self::Name(id, name) => format!("{} (id {id})", name.as_str()),
            Self::Backend(id, row) => format!("{} port {} (id {id})", row.addr, row.port),
            Self::NoName(id) | Self::NoBackend(id, _) => format!("id {id}"),
            Self::Slots(base, ids) => format!("{} slots from {base}", ids.len()),
            Self::Service(key, _) | Self::NoService(key) => key.to_string(),
            Self::FilterSet(word, mask) | Self::FilterClear(word, mask) => {
                format!("bit {mask:#x} of word {word}")
            }
        }
    }
}

/// What the tables hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Both tables of frontends.
    pub services: BTreeMap<FrontendKey, ServiceEntry>,
    /// Every slot, by position.
    pub slots: Vec<u32>,
    /// Ids of IPv4 endpoints that are in use.
    pub backends: BTreeMap<u32, Backend>,
    /// Ids of IPv6 endpoints that are in use; an id should be in one of the two only.
    pub backends6: BTreeMap<u32, Backend>,
    /// Every word of the filter.
    pub filter: Vec<u64>,
    /// Names of Service ports.
    pub names: BTreeMap<u32, PortName>,
}
