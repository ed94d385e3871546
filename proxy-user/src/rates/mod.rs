//! Rates per second, from the counters of the pinned maps at two times.
//!
//! [`Counters`] are one reading of the maps; [`Rates`] are a pure function of two readings, and [`History`] keeps the last
//! rates of each Service port in bounded memory. `ballast top` and the agent's page show nothing else. Traffic of
//! translated sockets passes no hook, so only its connections are counted, not its packets and bytes.

mod difference;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::reason::Reason;
use serde::Serialize;

use crate::maps::view::{FlowCounts, Snapshot, View, ViewError, monotonic};

pub use history::{History, Point};

/// The counters of the programs at one time.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Time of the reading, by the monotonic clock.
    pub at: Duration,
    /// Services, endpoints, and their counters.
    pub snapshot: Snapshot,
    /// Ids of the backends that get a small share until they answer.
    pub on_trial: BTreeSet<u32>,
    /// The count of each reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// The numbers of flows of the packet path.
    pub flows: FlowCounts,
}

impl Counters {
    /// Reads the pinned maps; works without a running agent.
    pub fn read(view: &View) -> Result<Self, ViewError> {
        Ok(Self {
            at: monotonic(),
            snapshot: view.snapshot()?,
            on_trial: view.on_trial()?,
            reasons: view.reasons()?,
            flows: view.flow_counts()?,
        })
    }

    /// Reads only the counters of Service ports and reasons, for [`Rates::of_totals`]: no frontends, endpoints and flows.
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

/// Rates per second. Packets and bytes are those of the packet path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Traffic {
    /// New connections.
    pub connections: f64,
    /// Translated packets, in both directions.
    pub packets: f64,
    /// Bytes of these packets, with their IP headers.
    pub bytes: f64,
    /// Refused or dropped connections and packets.
    pub failures: f64,
}

/// The rates between two readings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// Seconds between the two readings; 0: there was only one, and every rate is 0.
    pub seconds: f64,
    /// The sum of all Service ports.
    pub total: Traffic,
    /// Service ports, sorted by name.
    pub services: Vec<ServiceRates>,
    /// Reasons with a count above 0, sorted by number.
    pub reasons: Vec<ReasonRate>,
    /// Flows of the packet path that have not expired.
    pub flows: u64,
}

/// The rates of one Service port.
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
    /// Its frontends, sorted, without duplicates.
    pub frontends: Vec<SocketAddr>,
    /// Its algorithm.
    pub algorithm: &'static str,
    /// Its rates.
    pub rates: Traffic,
    /// Connections since the id came into use.
    pub connections: u64,
    /// Refusals and drops per second, by the label of the reason; only rates above 0.
    pub failures: BTreeMap<&'static str, f64>,
    /// Endpoints, sorted by address. A removed endpoint is included while it has open connections.
    pub endpoints: Vec<EndpointRates>,
}

impl ServiceRates {
    /// Returns the name that is the same on all nodes, unlike the id: `namespace/name:port/TCP/IPv4`.
    pub fn key(&self) -> String {
        format!("{}/{}/{}", self.service, self.protocol, self.family)
    }
}

/// The rates of one endpoint of a Service port.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRates {
    /// Its id in the maps.
    pub id: u32,
    /// Address and port.
    pub address: SocketAddr,
    /// `active`, `terminating`, or `gone`.
    pub state: &'static str,
    /// Whether it runs on this node.
    pub local: bool,
    /// Its current weight, which grows during slow start.
    pub weight: u32,
    /// New connections per second.
    pub connections: f64,
    /// Its part of the Service port's new connections, from 0 to 1; `null` if there were none.
    pub share: Option<f64>,
    /// Seconds for which it is still ejected.
    pub ejected_seconds: Option<u32>,
    /// Whether it gets a small share until it answers.
    pub on_trial: bool,
    /// Connections since the id came into use.
    pub total: u64,
    /// Open connections, if the algorithm of the Service uses them.
    pub open: Option<u64>,
}

/// The rate of one reason for refusing, dropping or passing packets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReasonRate {
    /// Its label.
    pub reason: &'static str,
    /// `reject`, `drop`, or `pass`.
    pub verdict: &'static str,
    /// Its meaning.
    pub explanation: &'static str,
    /// What to check.
    pub advice: &'static str,
    /// Its rate per second.
    pub rate: f64,
    /// Its count since the maps were created.
    pub total: u64,
}

#[cfg(test)]
pub(crate) mod tests;
