//! kube-proxy's configuration file and its flags.
//!
//! [`fields`] is the list of all settings; [`file`](mod@file) reads the file into [`Values`], and [`flags`] the flags,
//! checked by [`kind`]; [`merge`] turns them into the agent's settings, and [`document`] back into a file.

pub mod document;
pub mod fields;
pub mod file;
pub mod flags;
pub mod kind;
pub mod merge;
mod tree;
mod values;

pub use file::FileError;
pub use merge::Overlay;
pub use values::{Given, Values};

#[cfg(test)]
mod tests;
