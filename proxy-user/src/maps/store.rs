//! What the layer above may do with the maps.

use super::{BatchError, Capacity, Contents, MapError, Write};

/// The tables of Services, wherever they live.
pub trait Store {
    /// How many entries each table takes.
    fn capacity(&self) -> Capacity;

    /// Everything that is in the tables; of backends only the ids below `backends_below`.
    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError>;

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

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        (**self).write(writes)
    }
}
