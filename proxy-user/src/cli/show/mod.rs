//! Output of the reading commands: tables for people, JSON for scripts.
//!
//! Each answer is a pure function of rows; only `commands` and `change` do I/O. In JSON, field names are stable, ages are in
//! seconds, addresses are strings, and unknown values are `null`.

mod backend;
mod change;
mod commands;
mod config;
mod document;
mod dump;
mod error;
mod facts;
mod filter;
mod flow;
mod latency;
mod list;
mod map;
mod names;
mod probe;
mod service;
mod shared_ports;
mod stats;
mod status;
mod table;
mod watch;
mod which;
mod zero;

pub use backend::list as backend_list;
pub use commands::{Answer, backends, flows, maps, services, stats, status};
pub use config::config;
pub(super) use document::{document, json, yaml};
pub use error::{FilterError, ShowError};
pub use filter::{Scope, ServiceFilter};
pub use flow::{Selection as FlowSelection, list as flow_list};
pub use list::List;
pub(super) use map::is_nearly_full;
pub use map::list as map_list;
pub use probe::{AgentState, probe};
pub(super) use probe::{ask, problems, reachable};
pub use service::{list as service_list, show as service_show};
pub use status::{Facts, Status};
pub use table::{Table, age};
pub use which::AskLabels;

#[cfg(test)]
mod tests;
