//! Kubernetes' objects: read from an API server, and turned into ours.

pub mod client;
pub mod convert;
pub mod direct;
pub mod fresh;
mod kinds;
mod lists;
pub mod notices;
pub mod objects;
pub mod servers;
pub mod watch;
pub(crate) mod watch_health;
