//! `ballast cleanup` on a node with kube-proxy's rules: moves the connections of the packet path to `nf_conntrack`.

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use proxy_common::PROTO_TCP;
use proxy_core::model::FlowState;
use proxy_core::model::plural::plural;

use crate::host::netfilter::export_conntrack::{Connection, Conntrack, Stage, UnknownTcpDrop};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::maps::view::{FlowRow, Transport, View, ViewError};
use crate::programs::DetachHooks;

/// Why connections cannot be moved.
#[derive(Debug, thiserror::Error)]
enum HandoverError {
    #[error(transparent)]
    View(#[from] ViewError),
    #[error("netfilter: {0}")]
    Netfilter(#[from] io::Error),
}

/// Moves connections when the programs are detached.
#[derive(Debug)]
pub struct ConntrackExport {
    bpffs: PathBuf,
    has_successor: bool,
    unknown_tcp_drop: Option<UnknownTcpDrop>,
    /// What was done with the connections, in words; empty if there was nothing to do.
    said: String,
}

impl ConntrackExport {
    /// Creates an export of the maps on this bpffs.
    pub fn new(bpffs: PathBuf) -> Self {
        Self { bpffs, has_successor: false, unknown_tcp_drop: None, said: String::new() }
    }

    /// Returns what was done, in words.
    pub fn report(self) -> String {
        self.said
    }

    /// If kube-proxy takes over: stops connections unknown to conntrack, and deletes its entries of the packet path's
    /// connections.
    fn begin(&mut self) -> Result<(), HandoverError> {
        if !self.has_successor {
            return Ok(());
        }
        // The unknown_tcp_drop comes first, so that conntrack does not learn a deleted connection again.
        self.unknown_tcp_drop = Some(UnknownTcpDrop::begin()?);
        let mut conntrack = Conntrack::open()?;
        // A connection that stays does not keep the others from being moved.
        let mut first = Ok(());
        for connection in self.connections()? {
            let forgotten = conntrack.forget(&connection);
            first = first.and(forgotten);
        }
        Ok(first?)
    }

    fn end(&mut self) -> Result<(), HandoverError> {
        let Some(unknown_tcp_drop) = self.unknown_tcp_drop.take() else { return Ok(()) };
        let mut conntrack = Conntrack::open()?;
        let (mut adopted, mut failures) = (0usize, Vec::new());
        for connection in self.connections()? {
            match conntrack.forget(&connection).and_then(|()| conntrack.adopt(&connection)) {
                Ok(()) => adopted += 1,
                Err(error) => failures.push(error),
            }
        }
        drop(unknown_tcp_drop);
        self.said = format!("{} of the packet path moved to nf_conntrack\n", plural(adopted, "connection"));
        if let Some(first) = failures.first() {
            let _ = writeln!(self.said, "{} broken: {first}", plural(failures.len(), "connection"));
        }
        Ok(())
    }

    fn connections(&self) -> Result<Vec<Connection>, ViewError> {
        Ok(View::open(&self.bpffs)?.flows()?.iter().filter_map(connection).collect())
    }

    /// Records an error. Connections that cannot be moved break, but that does not stop the cleanup.
    fn note(&mut self, result: Result<(), HandoverError>) {
        if let Err(error) = result {
            self.unknown_tcp_drop = None;
            self.said = format!("cannot export connections of the packet path to conntrack: {error}\n");
        }
    }
}

impl DetachHooks for ConntrackExport {
    fn has_successor(&mut self) -> bool {
        match KubeProxyRules::read() {
            Ok(proxy) => self.has_successor = proxy.translates_by_conntrack(),
            Err(error) => self.note(Err(error.into())),
        }
        self.has_successor
    }

    fn before_detach(&mut self) {
        let result = self.begin();
        self.note(result);
    }

    fn after_detach(&mut self) {
        let result = self.end();
        self.note(result);
    }
}

/// Returns the connection of a flow that is worth moving.
fn connection(row: &FlowRow) -> Option<Connection> {
    let stage = match row.state {
        FlowState::Unreplied | FlowState::HalfOpen => Stage::Opening,
        FlowState::Established => Stage::Established,
        FlowState::Closing => Stage::Closing,
        FlowState::Closed | FlowState::Expired => return None,
    };
    let FlowRow { client, frontend, backend, source, .. } = *row;
    (row.protocol == Transport(PROTO_TCP)).then_some(Connection { client, frontend, backend, source, stage })
}
