//! The BPF maps that hold the Services. Only this module knows how they are written.
//!
//! [`Store`] is the interface for the layer above: it takes an ordered list of [`Write`]s, and returns the [`Contents`]. It
//! has three implementations: [`KernelStore`] (the pinned maps), [`MemoryStore`] (the same rules without a kernel) and
//! [`FaultyStore`] (wraps another store, and fails when told to).
//!
//! The rows here hold addresses of either family; a store puts them into the map of their family.

mod contents;
mod error;
mod faulty;
pub mod flow_growth;
mod flow_use;
pub mod forget;
mod kernel;
mod maglev;
mod mapping;
mod memory;
mod node;
mod rows;
pub mod segments;
mod settings;
mod store;
pub(crate) mod sys;
mod table;
pub mod view;
mod windows;

pub use contents::Contents;
pub use error::{BatchError, MapError};
pub use faulty::{Faults, FaultyStore};
pub use flow_use::{FilterBit, FlowUse, NoFlows};
pub use kernel::KernelStore;
pub use maglev::{MaglevRow, MaglevTable};
pub use memory::MemoryStore;
pub use node::{ConfigRow, NodeContents, NodeFamily, NodeRow, TunnelRow};
pub use rows::{Backend, Capacity, FrontendKey, Write};
pub use store::Store;
pub use table::Table;
