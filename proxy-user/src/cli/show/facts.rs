//! The facts that `ballast status` reads from the pinned programs and maps.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use proxy_common::node::NODE_ADDR_PORTS;
use proxy_common::reason::Reason;
use serde::Serialize;

use super::shared_ports::shared_ports;
use crate::host::diag::Diag;
use crate::maps::view::{BackendState, Overview, UsageRow, View, ViewError};
use crate::programs::{Attachment, MissingFeature, attachments, missing_features};
use proxy_cli::value::SnatPorts;

/// Numbers of what is programmed.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Counts {
    /// Service ports.
    pub ports: usize,
    /// Frontends.
    pub frontends: usize,
    /// Frontends without an endpoint.
    pub empty: usize,
    /// Unmanaged cluster addresses.
    pub unmanaged: usize,
    /// Endpoints that serve.
    pub backends: usize,
    /// Flows that have not expired.
    pub flows: u64,
}

/// The facts from the pinned programs and maps.
#[derive(Clone, Debug)]
pub struct StatusFacts {
    /// Folder of the maps.
    pub folder: PathBuf,
    /// ABI version that the agent wrote; 0: not written yet.
    pub abi: u32,
    /// Source ports for SNAT: `1024-29999,61000-65535`.
    pub snat_ports: String,
    /// Addresses on which node ports answer; loopback addresses: for sockets of the node.
    pub node_ports: Vec<IpAddr>,
    /// Ranges of Service addresses, whose unused addresses and ports are refused.
    pub service_cidrs: Vec<IpNet>,
    /// Attachments of the programs.
    pub attachments: Vec<Attachment>,
    /// Missing kernel features.
    pub missing_features: Vec<MissingFeature>,
    /// Usage of the maps.
    pub maps: Vec<UsageRow>,
    /// Numbers of what is programmed.
    pub counts: Counts,
    /// Node ports that processes of this node have bound, too, in sentences.
    pub shared_ports: Vec<String>,
    /// Counter of each reason.
    pub reasons: BTreeMap<Reason, u64>,
}

impl StatusFacts {
    /// Reads the facts.
    pub fn read(bpffs: &Path) -> Result<Self, ViewError> {
        let view = View::open(bpffs)?;
        let Overview { snapshot, flows, maps, reasons } = view.overview()?;
        let config = view.node_config()?;
        let addresses = view.node_addresses()?.into_iter();
        // A kernel without `sock_diag` shows no sockets; everything else is still shown.
        let servers = Diag::open().and_then(|mut diag| diag.servers()).unwrap_or_default();
        Ok(Self {
            folder: view.folder().to_owned(),
            abi: config.abi,
            snat_ports: SnatPorts(config.snat).to_string(),
            node_ports: addresses
                .filter(|(_, bits)| bits & NODE_ADDR_PORTS != 0)
                .map(|(address, _)| address)
                .collect(),
            service_cidrs: view.service_cidrs()?,
            attachments: attachments(bpffs),
            missing_features: missing_features(),
            maps,
            shared_ports: shared_ports(&servers, &snapshot, &view.node_addresses()?),
            counts: Counts {
                ports: snapshot.names.len(),
                frontends: snapshot.frontends.len(),
                empty: snapshot.frontends.iter().filter(|row| row.backends.is_empty()).count(),
                unmanaged: snapshot.unmanaged.len(),
                backends: snapshot.backends.values().filter(|row| row.state == BackendState::Active).count(),
                flows: flows.live(),
            },
            reasons,
        })
    }
}
