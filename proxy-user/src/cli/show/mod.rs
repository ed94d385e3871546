//! Output of the reading commands: tables for people, JSON for scripts.
//!
//! Each answer is a pure function of rows; only `commands` and `change` do I/O. In JSON, field names are stable, ages are in
//! seconds, addresses are strings, and unknown values are `null`.

mod backend;
mod by_service;
mod change;
mod commands;
mod config;
mod dump;
mod error;
mod facts;
mod flow;
mod latency;
mod map;
mod names;
mod probe;
mod service;
mod shared_ports;
mod stats;
mod status;
mod zero;

pub use backend::{AskPlaces, list as backend_list};
pub use commands::{AskApi, backends, flows, maps, services, stats, status};
pub(super) use commands::{problems, with_problems};
pub use config::config;
pub use error::{AskError, CommandOutput, ShowError};
pub use flow::{FlowSelection, list as flow_list};
pub(super) use map::is_nearly_full;
pub use map::list as map_list;
pub(super) use names::{ServiceIdentity, unmanaged_note};
pub use probe::{AgentReport, AgentState, probe};
pub(super) use probe::{agent_address, ask, parse, report};
pub use service::{ReportedState, ServiceProblems, list as service_list, show as service_show};
pub use stats::{Meter, StatsJson};
pub use status::{Status, StatusFacts};

#[cfg(test)]
pub(super) mod tests;
