//! The other place that objects come from: a folder of manifests, instead of a cluster or beside one.

mod debounce;
mod documents;
pub mod file_watch;
pub mod folder;
pub mod manifest;
