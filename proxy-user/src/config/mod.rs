//! The settings of the agent: those of the command line ([`Options`]), with kube-proxy's file and flags, merged and
//! checked once ([`RunConfig`]).
//!
//! The doc comments of settings that are flags are their help texts.

pub mod choices;
pub mod error;
pub mod kube_proxy;
pub mod network;
pub mod options;
pub mod otlp;
pub mod page;
pub mod paths;
pub mod run;
pub mod sizes;
pub mod timeouts;

pub use error::ConfigError;
pub use options::Options;
pub use run::RunConfig;
