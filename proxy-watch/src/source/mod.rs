//! The other source of objects: a folder of manifests, instead of a cluster or in addition to one.

mod debounce;
mod documents;
pub mod file_watch;
pub mod folder;
pub mod manifest;
mod unknown;

#[cfg(test)]
mod planned;
