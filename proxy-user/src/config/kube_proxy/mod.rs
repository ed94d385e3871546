//! kube-proxy's own ways to be told things: its configuration file and its flags.
//!
//! [`fields`] is the list of all of them; [`file`](mod@file) reads what was given into [`Values`], as `cli` does with flags,
//! checked by [`kind`]; [`overlay`] turns that into our settings, and [`document`] back into a file.

pub mod document;
pub mod fields;
pub mod file;
pub mod kind;
pub mod merge;
mod tree;
mod values;

pub use file::FileError;
pub use merge::Overlay;
pub use values::{Given, Values};

#[cfg(test)]
mod tests;
