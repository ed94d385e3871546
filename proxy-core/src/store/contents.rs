//! The contents of all tables.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use proxy_common::name::PortName;
use proxy_common::service::ServiceEntry;

use super::maglev::MaglevRow;
use super::node::NodeContents;
use super::rows::{Backend, FrontendKey, Write};
use super::table::Table;

/// The contents of all tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Both tables of frontends.
    pub services: BTreeMap<FrontendKey, ServiceEntry>,
    /// Every slot, by position.
    pub slots: Vec<u32>,
    /// Maglev tables, by index.
    pub maglev: BTreeMap<u32, MaglevRow>,
    /// IPv4 backends that are in use, by id.
    pub backends: BTreeMap<u32, Backend>,
    /// IPv6 backends that are in use, by id; an id should be in only one of the two maps.
    pub backends6: BTreeMap<u32, Backend>,
    /// All words of the prefilter.
    pub prefilter: Vec<u64>,
    /// Names of Service ports.
    pub names: BTreeMap<u32, PortName>,
    /// Allowed source ranges of both families, each with the id of its Service port.
    pub source_ranges: BTreeSet<(u32, IpNet)>,
    /// The tables about the node.
    pub node: NodeContents,
}

impl Contents {
    /// Leaves out the entries that these writes remove. Ranges stay: the mirror has invalid ones, too.
    pub fn leave_out(&mut self, removals: &[Write]) {
        for removal in removals {
            match removal {
                Write::NoBackend(id, Table::Backends) => {
                    self.backends.remove(id);
                }
                Write::NoBackend(id, _) => {
                    self.backends6.remove(id);
                }
                Write::NoName(id) => {
                    self.names.remove(id);
                }
                _ => {}
            }
        }
    }
}
