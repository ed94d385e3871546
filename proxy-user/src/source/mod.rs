//! The other place that objects come from: a folder of manifests, which needs no cluster.

pub mod beside;
mod documents;
pub mod folder;
pub mod manifest;
mod settle;
