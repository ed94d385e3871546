//! What happens in a second: the counters of the pinned maps, read twice.
//!
//! [`Counters`] are one look at the maps; [`Rates`] are a pure function of two of them, and [`History`] keeps the last ones of
//! each Service port in bounded memory. `ballast top` and the agent's page show nothing else. Traffic of translated sockets passes
//! no hook, so it counts as connections, not as packets and bytes.

mod difference;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::reason::Reason;
use serde::Serialize;

use crate::maps::view::{FlowCounts, Snapshot, View, ViewError, monotonic};

pub use history::{History, Point};

/// What the programs had counted at one moment.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// When: the monotonic clock.
    pub at: Duration,
    /// Services, endpoints, and what was counted for them.
    pub snapshot: Snapshot,
    /// Endpoints that get a small share until they answer, by backend id.
    pub on_trial: BTreeSet<u32>,
    /// How often each reason was met.
    pub reasons: BTreeMap<Reason, u64>,
    /// How many connections the packet path follows.
    pub flows: FlowCounts,
}

impl Counters {
    /// Reads the pinned maps; works while no agent runs.
    pub fn read(view: &View) -> Result<Self, ViewError> {
        Ok(Self {
            at: monotonic(),
            snapshot: view.snapshot()?,
            on_trial: view.on_trial()?,
            reasons: view.reasons()?,
            flows: view.flow_counts()?,
        })
    }

    /// Reads only what is counted for Service ports and reasons, for [`Rates::of_totals`]: no frontends, endpoints and flows.
    pub fn read_totals(view: &View) -> Result<Self, ViewError> {
        let at = monotonic();
        let names = view.names()?;
        let snapshot = Snapshot {
            service_stats: view.service_stats(names.keys().copied())?,
            refusals: view.refusals()?,
            names,
            ..Snapshot::default()
        };
        Ok(Self { at, snapshot, reasons: view.reasons()?, ..Self::default() })
    }
}

/// How much a second. Packets and bytes are those of the packet path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Traffic {
    /// Connections begun.
    pub connections: f64,
    /// Packets translated, both ways.
    pub packets: f64,
    /// Bytes of these, with their IP headers.
    pub bytes: f64,
    /// Connections and packets refused or dropped.
    pub failures: f64,
}

/// What happened between two looks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// Seconds between the two looks; 0: there was only one, and every rate is 0.
    pub seconds: f64,
    /// All Service ports together.
    pub total: Traffic,
    /// Service ports, in the order of their names.
    pub services: Vec<ServiceRates>,
    /// Reasons that were met, in the order of their numbers.
    pub reasons: Vec<ReasonRate>,
    /// Connections that the packet path follows and that have not expired.
    pub flows: u64,
}

/// One Service port.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRates {
    /// Its id in the maps.
    pub id: u32,
    /// `namespace/name:port`.
    pub service: String,
    /// `TCP`, `UDP`, `SCTP`.
    pub protocol: String,
    /// `IPv4`, `IPv6`.
    pub family: String,
    /// What clients dial, without repetitions.
    pub frontends: Vec<SocketAddr>,
    /// How connections are spread.
    pub algorithm: &'static str,
    /// How much a second.
    pub rates: Traffic,
    /// Connections begun since the id is in use.
    pub connections: u64,
    /// Refusals and drops a second, by the reason's label; those that did not happen are left out.
    pub failures: BTreeMap<&'static str, f64>,
    /// Endpoints, in the order of addresses. Those that left are here while they have connections to end.
    pub endpoints: Vec<EndpointRates>,
}

impl ServiceRates {
    /// Its name on all nodes, where its id differs: `namespace/name:port/TCP/IPv4`.
    pub fn key(&self) -> String {
        format!("{}/{}/{}", self.service, self.protocol, self.family)
    }
}

/// One endpoint of a Service port.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRates {
    /// Its id in the maps.
    pub id: u32,
    /// Address and port.
    pub address: SocketAddr,
    /// `active`, `terminating`, or `gone`.
    pub state: &'static str,
    /// It runs on this node.
    pub local: bool,
    /// How large its share should be at the moment; slow start lets it grow.
    pub weight: u32,
    /// Connections begun, a second.
    pub connections: f64,
    /// Its part of the Service port's new connections, from 0 to 1; `null` when there were none.
    pub share: Option<f64>,
    /// For so many more seconds new connections skip it.
    pub ejected_seconds: Option<u32>,
    /// It gets a small share until it answers.
    pub on_trial: bool,
    /// Connections begun since the id is in use.
    pub total: u64,
    /// Open connections, where the Service is spread by them.
    pub open: Option<u64>,
}

/// Why something was refused, dropped, or passed on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReasonRate {
    /// Its label.
    pub reason: &'static str,
    /// `reject`, `drop`, or `pass`.
    pub verdict: &'static str,
    /// What it means.
    pub explanation: &'static str,
    /// What to look at.
    pub advice: &'static str,
    /// How often a second.
    pub rate: f64,
    /// How often since the maps were made.
    pub total: u64,
}

#[cfg(test)]
pub(crate) mod tests;
