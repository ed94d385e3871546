//! What the layer above may do with the maps.

use std::ops::Range;

use super::{BatchError, Capacity, Contents, MapError, Table, Write};

/// The tables of Services, wherever they live.
pub trait Store {
    /// How many entries each table takes.
    fn capacity(&self) -> Capacity;

    /// Everything that is in the tables; of backends only the ids below `backends_below`.
    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError>;

    /// These elements of `slots`, `filter` or one of the `backends`, or the Maglev tables of these indexes; positions in the answer's lists count from the
    /// start of the range. What lies outside of the table is left out.
    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError>;

    /// About `count` entries of any other table, or all of it where that is small, in the table's own order, and where the next walk
    /// goes on (`None`: nowhere, and to begin with). An entry that is there all the time is met once; one that
    /// comes or goes between two walks may be.
    fn walk(
        &mut self,
        table: Table,
        from: Option<u32>,
        count: u32,
    ) -> Result<(Contents, Option<u32>), MapError>;

    /// Does all of `writes`, in their order as far as a reader of the maps can tell.
    ///
    /// It stops at the first that fails: those before it are done, those after it were not tried. Removing what
    /// is not there succeeds, so every write may be repeated.
    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError>;
}

impl<S: Store + ?Sized> Store for Box<S> {
    fn capacity(&self) -> Capacity {
        (**self).capacity()
    }

    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError> {
        (**self).read(backends_below)
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        (**self).read_range(table, range)
    }

    fn walk(
        &mut self,
        table: Table,
        from: Option<u32>,
        count: u32,
    ) -> Result<(Contents, Option<u32>), MapError> {
        (**self).walk(table, from, count)
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        (**self).write(writes)
    }
}
