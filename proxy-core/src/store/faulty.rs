//! A store that fails as its [`Faults`] say.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;

use super::{BatchError, Capacity, Contents, Cursor, MapError, Store, Table, Write};

/// The steps that fail. Steps are counted from 0, including those that fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// These steps fail.
    pub at: BTreeSet<u64>,
    /// All steps from this one on fail, as if the process had died here.
    pub from: Option<u64>,
    /// Number of random failures per 1,000 steps.
    pub per_mille: u32,
    /// Seed of the random numbers; the same seed fails at the same steps.
    pub seed: u64,
    /// Steps that fail report a full table, not an IO error.
    pub full: bool,
}

/// Wraps a store and lets some of its writes fail.
pub struct FaultyStore<S> {
    inner: S,
    faults: Faults,
    step: u64,
    failed: u64,
    handed: usize,
}

impl<S: Store> FaultyStore<S> {
    /// Wraps `inner`.
    pub fn new(inner: S, faults: Faults) -> Self {
        Self { inner, faults, step: 0, failed: 0, handed: 0 }
    }

    /// Replaces the faults; steps are counted from 0 again.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
        self.step = 0;
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Mutable access to the wrapped store.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the wrapped store, without the faults.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// Number of writes that failed so far.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Number of writes that were handed over in all calls, done or not.
    pub fn handed(&self) -> usize {
        self.handed
    }

    fn fails(&mut self) -> bool {
        let step = self.step;
        self.step += 1;
        let Faults { at, from, per_mille, seed, .. } = &self.faults;
        let fails = at.contains(&step)
            || from.is_some_and(|from| step >= from)
            || mix(seed.wrapping_add(step)) % 1000 < u64::from(*per_mille);
        self.failed += u64::from(fails);
        fails
    }
}

/// One step of splitmix64 (public domain, Vigna): random enough, and the same on every run.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl<S: Store> Store for FaultyStore<S> {
    fn capacity(&self) -> Capacity {
        self.inner.capacity()
    }

    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError> {
        self.inner.read(backends_below)
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        self.inner.read_range(table, range)
    }

    fn walk(
        &mut self,
        table: Table,
        from: Option<Cursor>,
        count: u32,
    ) -> Result<(Contents, Option<Cursor>), MapError> {
        self.inner.walk(table, from, count)
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        self.handed += writes.len();
        for (done, write) in writes.iter().enumerate() {
            if self.fails() {
                let errno = if self.faults.full && !write.removes() { libc::E2BIG } else { libc::EIO };
                return Err(BatchError {
                    done,
                    error: MapError::of(write, io::Error::from_raw_os_error(errno)),
                });
            }
            self.inner
                .write(std::slice::from_ref(write))
                .map_err(|BatchError { error, .. }| BatchError { done, error })?;
        }
        Ok(())
    }
}
