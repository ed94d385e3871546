//! The tables that hold the Services, as the layer above sees them.
//!
//! [`Store`] takes an ordered list of [`Write`]s, and returns the [`Contents`]. It has three implementations: the agent's pinned
//! maps, and for tests `MemoryStore` (the same rules without a kernel) and `FaultyStore` (wraps another store, and fails as its
//! `Faults` say).
//!
//! The rows here hold addresses of either family; a store puts them into the map of their family.

mod contents;
mod error;
#[cfg(any(test, feature = "testing"))]
mod faulty;
mod flow_use;
mod maglev;
#[cfg(any(test, feature = "testing"))]
mod memory;
mod node;
mod rows;
mod table;

use std::ops::Range;

use ipnet::IpNet;

pub use contents::Contents;
pub use error::{BatchError, MapError};
#[cfg(any(test, feature = "testing"))]
pub use faulty::{Faults, FaultyStore};
pub use flow_use::{Ends, FilterBit, FlowUse, NoFlows};
pub use maglev::{MaglevRow, MaglevTable, PREVIOUS};
#[cfg(any(test, feature = "testing"))]
pub use memory::MemoryStore;
pub use node::{ConfigRow, NodeContents, NodeFamily, NodeRow, TunnelRow, range_parts, range_words};
pub use rows::{Backend, Capacity, FrontendKey, Write};
pub use table::Table;

/// Where a walk of a table continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cursor {
    /// At this bucket of a hash, or position of an array.
    At(u32),
    /// After this range of the set with this id.
    After(u32, IpNet),
}

/// The tables of Services, in the kernel or in memory.
pub trait Store {
    /// Returns the number of entries that each table can hold.
    fn capacity(&self) -> Capacity;

    /// Reads all tables; of backends only the ids below `backends_below`.
    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError>;

    /// Reads these elements of `slots`, `filter` or one of the `backends`, or the Maglev tables of these indexes. Positions
    /// in the returned lists count from the start of the range. Elements outside of the table are left out.
    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError>;

    /// Reads about `count` entries of any other table, or all of a small table, in the table's own order. Also returns where
    /// the next walk continues (as `from`: `None` to start; as a result: `None` at the end). An entry that exists all the
    /// time is returned, source ranges perhaps more than once; an entry that is added or removed between two walks may be.
    fn walk(
        &mut self,
        table: Table,
        from: Option<Cursor>,
        count: u32,
    ) -> Result<(Contents, Option<Cursor>), MapError>;

    /// Does all of `writes`; readers of the maps see them in this order.
    ///
    /// Stops at the first failure: the writes before it are done, those after it are not tried. Removing an entry that does
    /// not exist succeeds, so every write may be repeated.
    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError>;
}
