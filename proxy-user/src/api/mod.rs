//! Kubernetes' objects: read from an API server, and turned into ours.

pub mod client;
pub mod convert;
mod kinds;
pub mod notices;
mod outage;
pub mod watch;
