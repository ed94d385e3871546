//! Ballast's agent and command line, as a library.
//!
//! Dependencies go one way, and `cargo xtask lint` holds us to it:
//!
//! ```text
//! api, source -> model -> plan -> sync -> maps
//!                                 programs, host, sockets, http, metrics, config, cli beside them
//! app puts them together; main parses and runs.
//! ```
//!
//! * [`model`]: the cluster as we understand it; no Kubernetes types, no clock, no IO.
//! * [`api`], [`source`]: the two places objects come from (an API server, a folder of manifests).
//! * [`plan`]: pure; the model and a node in, what the maps should say out, without ids or positions.
//! * [`sync`]: ids, extents, the difference to what is applied, ordered writes; one task owns it all.
//! * [`audit`]: compares maps, model and API server, apart from all that is remembered.
//! * [`maps`]: the BPF maps; the only place that knows how they are written and read.
//! * [`programs`]: load, attach, pin, replace and remove the BPF programs.
//! * [`host`]: devices and the cgroup tree.
//! * [`connections`]: the count of open connections.
//! * [`sockets`]: connected UDP sockets whose endpoint left.
//! * [`config`]: the agent's settings, of flags and of kube-proxy's file.
//! * [`rates`]: what happens in a second, by the maps' counters.
//! * [`page`]: the page at `/` of the metrics server, of one node or of a cluster.
//! * [`kubectl`]: the agents of all nodes, asked through the API server.
//! * [`otlp`]: OpenTelemetry's records and spans, and their export; [`spans`]: which of the agent's work is one.
//! * [`http`], [`metrics`], [`cli`], [`top`], [`telemetry`]: what people and machines look at.

pub mod api;
pub mod app;
pub mod audit;
pub mod cli;
pub mod config;
pub mod connections;
pub mod host;
pub mod http;
pub mod kubectl;
pub mod maps;
pub mod metrics;
pub mod model;
pub mod otlp;
pub mod page;
pub mod plan;
pub mod programs;
pub mod rates;
pub mod sockets;
pub mod source;
pub mod spans;
pub mod sync;
pub mod telemetry;
pub mod top;
