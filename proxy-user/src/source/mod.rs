//! The other place that objects come from: a folder of manifests, instead of a cluster or beside one.

pub mod beside;
mod documents;
pub mod folder;
pub mod manifest;
mod settle;
