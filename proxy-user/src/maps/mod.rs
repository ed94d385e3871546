//! The BPF maps that say where Services go: the only place that knows how they are written.
//!
//! [`Store`] is what the layer above sees: an ordered list of [`Write`]s in, the [`Contents`] out. It has three
//! implementations: [`KernelStore`] (the pinned maps), [`MemoryStore`] (the same rules without a kernel) and
//! [`FaultyStore`] (any of them, failing when told to).
//!
//! The rows here hold addresses of either family; a store puts them into the map of their family.

mod error;
mod faulty;
mod kernel;
mod mapping;
mod memory;
mod node;
mod rows;
mod store;
mod sys;
pub mod view;

pub use error::{BatchError, MapError};
pub use faulty::{Faults, FaultyStore};
pub use kernel::KernelStore;
pub use memory::MemoryStore;
pub use node::{ConfigRow, NodeContents, NodeFamily, NodeRow};
pub use rows::{Backend, Capacity, Contents, FrontendKey, Table, Write};
pub use store::Store;
