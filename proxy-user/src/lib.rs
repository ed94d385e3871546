//! Ballast's agent and command line, as a library.
//!
//! Dependencies go one way, which `cargo xtask lint` checks:
//!
//! ```text
//! proxy_watch -> proxy_core: model -> plan -> sync -> store
//!                                 programs, host, sockets, http, metrics, config, cli beside them
//! app puts them together; main parses and runs.
//! ```
//!
//! * [`driver`]: the task that alone owns the cluster state and the maps, and its status for others.
//! * [`audit`]: compares maps, model and API server, independently of all state that is kept in memory.
//! * [`maps`]: the BPF maps; the only module that knows how they are written and read.
//! * [`programs`]: load, attach, pin, replace and remove the BPF programs.
//! * [`host`]: the node: devices, addresses, routes and `IPsec` policies (netlink), network namespaces, cgroups, netfilter, ports in
//!   use, and the attachment of programs to devices that appear.
//! * [`connections`]: the count of open connections.
//! * [`sockets`]: connected sockets whose endpoint was removed.
//! * [`config`]: the agent's settings, from flags and from kube-proxy's file.
//! * [`rates`]: rates per second, from the maps' counters.
//! * [`page`]: the page at `/` of the metrics server, of one node or of a cluster.
//! * [`otlp`]: OpenTelemetry's records and spans, and their export.
//! * [`http`], [`metrics`], [`cli`], [`top`], [`telemetry`]: the interfaces for people and machines.

pub mod app;
pub mod audit;
pub mod cli;
pub mod config;
pub mod connections;
pub mod driver;
pub mod gate;
pub mod host;
pub mod http;
pub mod maps;
pub mod metrics;
pub mod otlp;
pub mod page;
pub mod programs;
pub mod rates;
pub mod sockets;
pub mod telemetry;
pub mod top;
