//! Reads Kubernetes objects from an API server, and converts them to the agent's model.

pub mod client;
pub mod convert;
pub mod direct;
mod frames;
pub mod fresh;
mod kinds;
mod lists;
pub mod notices;
pub mod objects;
mod protobuf;
mod reflector;
pub mod servers;
mod transport;
pub mod watch;
pub(crate) mod watch_health;
