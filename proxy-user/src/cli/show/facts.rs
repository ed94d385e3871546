//! What the pins tell `ballast status`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proxy_common::reason::Reason;

use crate::config::value::SnatPorts;
use crate::maps::view::{BackendState, Overview, UsageRow, View, ViewError};
use crate::programs::{Attachment, Lack, attachments, lacks};

/// What the pins tell.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Folder of the maps.
    pub folder: PathBuf,
    /// The layout that the agent wrote; 0 before it did.
    pub abi: u32,
    /// Source ports for SNAT: `1024-29999,61000-65535`.
    pub snat_ports: String,
    /// Where the programs are.
    pub attachments: Vec<Attachment>,
    /// What the kernel lacks.
    pub lacks: Vec<Lack>,
    /// Maps.
    pub maps: Vec<UsageRow>,
    /// Service ports.
    pub ports: usize,
    /// Addresses that clients may dial.
    pub frontends: usize,
    /// Those of them without an endpoint.
    pub empty: usize,
    /// Cluster addresses that are left alone.
    pub unmanaged: usize,
    /// Endpoints that serve.
    pub backends: usize,
    /// Connections that are not expired.
    pub flows: u64,
    /// How often each reason was met.
    pub reasons: BTreeMap<Reason, u64>,
}

impl Facts {
    /// Reads them.
    pub fn read(bpffs: &Path) -> Result<Self, ViewError> {
        let view = View::open(bpffs)?;
        let Overview { snapshot, flows, maps, reasons } = view.overview()?;
        let config = view.node_config()?;
        Ok(Self {
            folder: view.folder().to_owned(),
            abi: config.abi,
            snat_ports: SnatPorts(config.snat).to_string(),
            attachments: attachments(bpffs),
            lacks: lacks(),
            maps,
            ports: snapshot.names.len(),
            empty: snapshot.frontends.iter().filter(|row| row.backends.is_empty()).count(),
            frontends: snapshot.frontends.len(),
            unmanaged: snapshot.unmanaged.len(),
            backends: snapshot.backends.values().filter(|row| row.state == BackendState::Active).count(),
            flows: flows.live(),
            reasons,
        })
    }
}
