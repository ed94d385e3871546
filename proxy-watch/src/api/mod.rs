//! Reads Kubernetes objects from an API server, and converts them to the agent's model.

mod authority;
pub mod client;
pub mod connect;
pub mod convert;
pub mod credentials;
pub mod direct;
pub mod files;
mod frames;
pub mod fresh;
mod history;
mod jitter;
mod kinds;
pub mod kubeconfig;
pub mod lookup;
pub mod notices;
pub mod objects;
pub mod pod;
mod protobuf;
mod proxy;
mod reflector;
pub mod servers;
mod transport;
pub mod watch;
pub(crate) mod watch_health;
