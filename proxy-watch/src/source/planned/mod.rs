//! Manifests, as a user writes them, and what is planned for them.

mod service;
mod tunnels;
