//! One pin, used only after its type and sizes were compared with the expected ones.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aya::maps::{Map, MapData, MapType, PerCpuArray};
use aya::util::nr_cpus;
use aya_obj::generated::BPF_F_MMAPABLE;
use proxy_common::abi::Plain;
use rustix::mm::ProtFlags;

use super::ViewError;
use super::ring::Ring;
use crate::maps::mapping::Mapping;
use crate::maps::segments::{SegmentShape, Segments};
use crate::maps::sys;

/// An opened map of the expected type.
pub(super) struct Pin {
    path: PathBuf,
    data: MapData,
    /// The elements of an array.
    array: Option<Segments>,
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
        let pin = Self {
            key_size: info.key_size(),
            value_size: info.value_size(),
            capacity: info.max_entries(),
            flags: info.map_flags(),
            array: None,
            data,
            path,
        };
        let is_array = [MapType::Array, MapType::PerCpuArray].contains(&kind);
        if !is_array || ![MapType::ArrayOfMaps, kind].contains(&found) {
            return if found == kind { Ok(pin) } else { Err(shape(pin.path, "type", found, kind)) };
        }
        let array = pin.read(Segments::open(folder, name))?;
        let SegmentShape { kind: found, value_size, flags, entries: _ } = array.shape();
        if found != kind as u32 {
            return Err(shape(pin.path, "type", found, kind as u32));
        }
        let (key_size, capacity) = (size_of::<u32>() as u32, array.len() as u32);
        Ok(Self { key_size, value_size, capacity, flags, array: Some(array), ..pin })
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
        self.read(sys::count::<K, V>(self.data.fd().as_fd())).map(|count| count as u32)
    }

    /// Maps the elements of an array into memory, read-only: the caller can read all of them without a copy.
    pub(super) fn mapped<V: Plain>(&self) -> Result<Mapping, ViewError> {
        self.map::<V>(ProtFlags::READ)
    }

    /// Maps the elements of an array into memory, for reading and writing.
    pub(super) fn shared<V: Plain>(&self) -> Result<Mapping, ViewError> {
        self.map::<V>(ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map<V: Plain>(&self, protection: ProtFlags) -> Result<Mapping, ViewError> {
        self.check::<u32, V>()?;
        let array = self.array.as_ref().filter(|_| self.flags & BPF_F_MMAPABLE != 0);
        let array = array
            .ok_or_else(|| shape(self.path.clone(), "flags", self.flags, self.flags | BPF_F_MMAPABLE))?;
        self.read(array.map(protection, 0..array.len()))
    }

    /// Returns at least the first `count` entries, or all if there are fewer.
    pub(super) fn first<K: Plain, V: Plain>(&self, count: u32) -> Result<Vec<(K, V)>, ViewError> {
        self.check::<K, V>()?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let found = sys::lookup(self.data.fd().as_fd(), None, count.min(self.capacity) as usize);
        self.read(found).map(|(found, _)| found)
    }

    /// Passes the first `count` entries of a per-CPU array to `take`: the index, and the values of all CPUs.
    pub(super) fn first_per_cpu<V: Plain>(
        &self,
        count: u32,
        mut take: impl FnMut(u32, &[V]),
    ) -> Result<(), ViewError> {
        self.check::<u32, V>()?;
        let cpus = self.read(nr_cpus().map_err(|(_, source)| source))?;
        let (segments, per) = self.segments();
        for (segment, base) in segments.iter().zip((0..count).step_by(per as usize)) {
            let here = (count - base).min(per);
            let take = |id, values: &[V]| take(base + id, values);
            self.read(sys::lookup_per_cpu(segment.as_fd(), here, cpus, take))?;
        }
        Ok(())
    }

    /// Returns these elements of an array.
    pub(super) fn elements<V: Plain>(&self, range: Range<u32>) -> Result<Vec<(u32, V)>, ViewError> {
        self.check::<u32, V>()?;
        self.read(self.array.as_ref().map_or(Ok(Vec::new()), |array| array.lookup(range)))
    }

    /// Returns the segments of an array, and the number of elements of each.
    pub(super) fn segments(&self) -> (Vec<Arc<OwnedFd>>, u32) {
        self.array.as_ref().map_or((Vec::new(), 1), |array| (array.all(), array.shape().entries))
    }

    pub(super) fn into_parts(self) -> (PathBuf, MapData) {
        (self.path, self.data)
    }

    /// Opens a segment of an array per CPU.
    pub(super) fn per_cpu<V: aya::Pod>(
        &self,
        segment: &OwnedFd,
    ) -> Result<PerCpuArray<MapData, V>, ViewError> {
        let fd = self.read(segment.try_clone())?;
        self.element(MapData::from_fd(fd).and_then(|map| Map::PerCpuArray(map).try_into()))
    }

    /// Adds the path to an error of the system.
    fn read<T>(&self, read: io::Result<T>) -> Result<T, ViewError> {
        read.map_err(|source| ViewError::Read { path: self.path.clone(), source })
    }

    /// Adds the path to an error of aya.
    pub(super) fn element<T>(&self, read: Result<T, aya::maps::MapError>) -> Result<T, ViewError> {
        read.map_err(|source| ViewError::map(&self.path, source))
    }

    /// Maps the ring buffer into memory.
    pub(super) fn ring(&self) -> Result<Ring, ViewError> {
        self.read(Ring::new(self.data.fd().as_fd(), self.capacity as usize))
    }
}

fn shape(path: PathBuf, what: &'static str, found: impl Debug, expected: impl Debug) -> ViewError {
    ViewError::Shape { path, what, found: format!("{found:?}"), expected: format!("{expected:?}") }
}
