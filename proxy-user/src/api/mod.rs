//! Kubernetes' objects: read from an API server, and turned into ours.

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
