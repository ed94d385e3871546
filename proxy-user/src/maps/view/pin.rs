//! One pin, used only after its type and sizes were compared with the expected ones.

use std::fmt::Debug;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use aya::maps::{MapData, MapType};
use aya::util::nr_cpus;
use aya_obj::generated::BPF_F_MMAPABLE;
use proxy_common::abi::Plain;

use super::ViewError;
use super::ring::Ring;
use crate::maps::mapping::Mapping;
use crate::maps::sys;

/// An opened map of the expected type.
pub(super) struct Pin {
    path: PathBuf,
    data: MapData,
    key_size: u32,
    value_size: u32,
    capacity: u32,
    flags: u32,
}

impl Pin {
    pub(super) fn open(folder: &Path, name: &'static str, kind: MapType) -> Result<Self, ViewError> {
        let path = folder.join(name);
        let error = |source| ViewError::map(&path, source);
        let data = MapData::from_pin(&path).map_err(error)?;
        let info = data.info().map_err(error)?;
        let found = info.map_type().map_err(error)?;
        if found != kind {
            return Err(shape(path, "type", found, kind));
        }
        Ok(Self {
            key_size: info.key_size(),
            value_size: info.value_size(),
            capacity: info.max_entries(),
            flags: info.map_flags(),
            data,
            path,
        })
    }

    /// Checks the sizes of key and value.
    pub(super) fn checked<K: Plain, V: Plain>(self) -> Result<Self, ViewError> {
        self.check::<K, V>()?;
        Ok(self)
    }

    fn check<K: Plain, V: Plain>(&self) -> Result<(), ViewError> {
        let sizes =
            [("key size", self.key_size, size_of::<K>()), ("value size", self.value_size, size_of::<V>())];
        for (what, found, expected) in sizes {
            if found as usize != expected {
                return Err(shape(self.path.clone(), what, found, expected));
            }
        }
        Ok(())
    }

    /// Returns all entries, in the map's own order.
    pub(super) fn all<K: Plain, V: Plain>(&self) -> Result<Vec<(K, V)>, ViewError> {
        self.first(self.capacity)
    }

    /// Returns the number of entries.
    pub(super) fn count<K: Plain, V: Plain>(&self) -> Result<u32, ViewError> {
        self.check::<K, V>()?;
        let count = sys::count::<K, V>(self.data.fd().as_fd());
        count.map(|count| count as u32).map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    /// Maps the elements of an array into memory, read-only: the caller can read all of them without a copy.
    pub(super) fn mapped<V: Plain>(&self) -> Result<Mapping, ViewError> {
        self.check::<u32, V>()?;
        if self.flags & BPF_F_MMAPABLE == 0 {
            return Err(shape(self.path.clone(), "flags", self.flags, self.flags | BPF_F_MMAPABLE));
        }
        Mapping::read_only(self.data.fd().as_fd(), size_of::<V>(), self.capacity as usize)
            .map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    /// Returns at least the first `count` entries, or all if there are fewer.
    pub(super) fn first<K: Plain, V: Plain>(&self, count: u32) -> Result<Vec<(K, V)>, ViewError> {
        self.check::<K, V>()?;
        if count == 0 {
            return Ok(Vec::new());
        }
        sys::lookup(self.data.fd().as_fd(), None, count.min(self.capacity) as usize)
            .map(|(found, _)| found)
            .map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    /// Passes the first `count` entries of a per-CPU array to `take`: the index, and the values of all CPUs.
    pub(super) fn first_per_cpu<V: Plain>(
        &self,
        count: u32,
        take: impl FnMut(u32, &[V]),
    ) -> Result<(), ViewError> {
        self.check::<u32, V>()?;
        let read = |source| ViewError::Read { path: self.path.clone(), source };
        let cpus = nr_cpus().map_err(|(_, source)| read(source))?;
        sys::lookup_per_cpu(self.data.fd().as_fd(), count.min(self.capacity), cpus, take).map_err(read)
    }

    /// Maps the ring buffer into memory.
    pub(super) fn ring(&self) -> Result<Ring, ViewError> {
        Ring::new(self.data.fd().as_fd(), self.capacity as usize)
            .map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    /// Maps the elements of an array into memory, for reading and writing.
    pub(super) fn shared<V: Plain>(&self) -> Result<Mapping, ViewError> {
        self.check::<u32, V>()?;
        Mapping::new(self.data.fd().as_fd(), size_of::<V>(), self.capacity as usize)
            .map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    pub(super) fn into_parts(self) -> (PathBuf, MapData) {
        (self.path, self.data)
    }
}

fn shape(path: PathBuf, what: &'static str, found: impl Debug, expected: impl Debug) -> ViewError {
    ViewError::Shape { path, what, found: format!("{found:?}"), expected: format!("{expected:?}") }
}
