//! All that the tables hold.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use proxy_common::name::PortName;
use proxy_common::service::ServiceEntry;

use super::maglev::MaglevRow;
use super::node::NodeContents;
use super::rows::{Backend, FrontendKey};

/// What the tables hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Both tables of frontends.
    pub services: BTreeMap<FrontendKey, ServiceEntry>,
    /// Every slot, by position.
    pub slots: Vec<u32>,
    /// Maglev tables, by index.
    pub maglev: BTreeMap<u32, MaglevRow>,
    /// Ids of IPv4 endpoints that are in use.
    pub backends: BTreeMap<u32, Backend>,
    /// Ids of IPv6 endpoints that are in use; an id should be in one of the two only.
    pub backends6: BTreeMap<u32, Backend>,
    /// Every word of the filter.
    pub filter: Vec<u64>,
    /// Names of Service ports.
    pub names: BTreeMap<u32, PortName>,
    /// Ranges of clients, by the id of the Service port; both families.
    pub source_ranges: BTreeSet<(u32, IpNet)>,
    /// What the node is like.
    pub node: NodeContents,
}
