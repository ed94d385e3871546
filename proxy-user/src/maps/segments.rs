//! An array map that grows: a map of maps, whose elements are arrays of equal size (segments).
//!
//! A program reads element `i` in segment `i / per`. A further segment becomes visible to all programs with one update of the
//! outer map, so a growth moves no element, replaces no program, and no packet notices it. A missing segment is like an index
//! beyond an array. Each segment is pinned before programs see it, so that every process finds all of them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use aya::maps::{MapData, MapType};
use proxy_common::abi::Plain;
use proxy_common::map_names::SEGMENTS;
use rustix::mm::ProtFlags;

use super::mapping::Mapping;
use super::sys::{self, Stopped};

/// The folder of the pins of segments, below that of the maps.
pub const FOLDER: &str = "segments";

/// The properties of each segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentShape {
    /// `BPF_MAP_TYPE_*`.
    pub kind: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// `BPF_F_*`.
    pub flags: u32,
    /// Number of elements.
    pub entries: u32,
}

impl SegmentShape {
    /// Returns the properties of the segments of a map of the object.
    pub fn wanted(segment: &aya_obj::Map) -> Self {
        Self {
            kind: segment.map_type(),
            value_size: segment.value_size(),
            flags: segment.map_flags(),
            entries: segment.max_entries(),
        }
    }

    fn untyped(self) -> aya_obj::Map {
        let key_size = size_of::<u32>() as u32;
        aya_obj::Map::new_from_params(self.kind, key_size, self.value_size, self.entries, self.flags)
    }

    fn of(map: &MapData) -> Result<Self, aya::maps::MapError> {
        let info = map.info()?;
        Ok(Self {
            kind: info.map_type()? as u32,
            value_size: info.value_size(),
            flags: info.map_flags(),
            entries: info.max_entries(),
        })
    }
}

/// The segments that this process has opened, by their pins. A segment that has lost its pin cannot be found in another way.
static OPENED: Mutex<BTreeMap<PathBuf, Arc<OwnedFd>>> = Mutex::new(BTreeMap::new());

/// Pins those segments of maps in `folder` again that this process knows and that have lost their pins; returns how many.
pub fn repair(folder: &Path) -> io::Result<usize> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let lost = opened.iter().filter(|(path, _)| path.starts_with(folder) && path.symlink_metadata().is_err());
    let mut count = 0;
    for (path, segment) in lost {
        make_folder(folder)?;
        let map = MapData::from_fd(segment.try_clone()?).map_err(sys::io_error)?;
        map.pin(path).map_err(io::Error::other)?;
        count += 1;
    }
    Ok(count)
}

fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder.join(FOLDER)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// An array map, which may consist of segments.
pub(super) struct Segments {
    /// The map of maps, and the folder of its pin; `None`: a plain array, which does not grow.
    outer: Option<(OwnedFd, PathBuf)>,
    name: &'static str,
    shape: SegmentShape,
    present: RwLock<Present>,
}

/// The segments that exist.
struct Present {
    all: Vec<Arc<OwnedFd>>,
    /// How many of them this process has made visible to the programs, or has found to be so.
    shown: usize,
}

/// Returns the file descriptor of a map.
fn fd_of(map: &MapData) -> io::Result<OwnedFd> {
    map.fd().as_fd().try_clone_to_owned()
}

/// Compares a pin with a map of segments of this shape: `None` if nothing is pinned; an error without a number of the system
/// says how the pin differs, and one with a number why it could not be opened.
pub fn judge(folder: &Path, name: &'static str, wanted: SegmentShape) -> Option<io::Result<()>> {
    folder.join(name).symlink_metadata().ok()?;
    Some(Segments::open(folder, name).and_then(|found| {
        let shape = found.shape;
        if found.outer.is_none() {
            Err(io::Error::other("no map of segments"))
        } else if shape != wanted {
            Err(io::Error::other(format!("segments of {shape:?} instead of {wanted:?}")))
        } else {
            Ok(())
        }
    }))
}

/// Creates and pins a map of segments with its first segment, unless it is there; `btf`: the object's type information in the
/// kernel.
pub fn create(
    folder: &Path,
    name: &'static str,
    segment: aya_obj::Map,
    btf: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    Segments::create(folder, name, segment, btf).map(drop)
}

/// Creates a map of segments like this one without pin and content, for a test that loads the programs itself.
pub fn create_outer(name: &str, segment: &MapData) -> io::Result<OwnedFd> {
    sys::create_outer(name, SEGMENTS, segment.fd().as_fd())
}

/// Returns the path of the pin of a map's first segment, or of a map without segments.
pub fn first_segment(folder: &Path, name: &str) -> PathBuf {
    let first = pin_of(folder, name, 0);
    if first.exists() { first } else { folder.join(name) }
}

/// Lets a pinned map grow to this number of elements.
pub fn grow(folder: &Path, name: &'static str, len: usize) -> io::Result<()> {
    Segments::open(folder, name)?.ensure(len).map(drop)
}

/// Removes the pins of the segments of a map.
pub fn forget(folder: &Path, name: &str) -> io::Result<()> {
    OPENED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .retain(|path, _| !(0..SEGMENTS as usize).any(|number| *path == pin_of(folder, name, number)));
    for number in 0..SEGMENTS as usize {
        match fs::remove_file(pin_of(folder, name, number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            removed => removed?,
        }
    }
    Ok(())
}

/// Returns the path of the pin of a segment.
pub(super) fn pin_of(folder: &Path, name: &str, number: usize) -> PathBuf {
    folder.join(FOLDER).join(format!("{name}_{number}"))
}

impl Segments {
    /// Creates and pins a map of segments with its first segment, unless it is there.
    pub(super) fn create(
        folder: &Path,
        name: &'static str,
        segment: aya_obj::Map,
        btf: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        let shape = SegmentShape::wanted(&segment);
        // The object's map names types, which are an error without the object's type information.
        let segment = if btf.is_some() { segment } else { shape.untyped() };
        make_folder(folder)?;
        if folder.join(name).symlink_metadata().is_err() {
            let first = open_or_create(folder, name, 0, || {
                MapData::create(segment, name, btf).map_err(sys::io_error)
            })?;
            let outer = sys::create_outer(name, SEGMENTS, first.as_fd())?;
            let outer = MapData::from_fd(outer).map_err(sys::io_error)?;
            outer.pin(folder.join(name)).map_err(io::Error::other)?;
        }
        let map = Self::open(folder, name)?;
        if map.shape != shape {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{:?} instead of {shape:?}", map.shape),
            ));
        }
        map.ensure(1)?;
        Ok(map)
    }

    /// Opens the pinned map of this name, and its segments.
    pub(super) fn open(folder: &Path, name: &'static str) -> io::Result<Self> {
        let pinned = |path: PathBuf| MapData::from_pin(path).map_err(sys::io_error);
        let map = pinned(folder.join(name))?;
        let kind = map.info().and_then(|info| info.map_type()).map_err(sys::io_error)?;
        let (outer, first) = match kind {
            MapType::ArrayOfMaps => {
                (Some((fd_of(&map)?, folder.to_owned())), pinned(pin_of(folder, name, 0))?)
            }
            _ => (None, map),
        };
        let shape = SegmentShape::of(&first).map_err(sys::io_error)?;
        let mut segments = vec![Arc::new(fd_of(&first)?)];
        while outer.is_some() && pin_of(folder, name, segments.len()).symlink_metadata().is_ok() {
            segments.push(Arc::new(fd_of(&pinned(pin_of(folder, name, segments.len()))?)?));
        }
        if outer.is_some() {
            segments
                .iter()
                .enumerate()
                .for_each(|(number, segment)| note(pin_of(folder, name, number), segment));
        }
        Ok(Self { outer, name, shape, present: RwLock::new(Present { all: segments, shown: 0 }) })
    }

    /// Returns a plain array of a file that can be mapped.
    #[cfg(test)]
    pub(super) fn plain(file: OwnedFd, value_size: u32, entries: u32) -> Self {
        let shape = SegmentShape { kind: MapType::Array as u32, value_size, flags: 0, entries };
        Self {
            outer: None,
            name: "",
            shape,
            present: RwLock::new(Present { all: vec![Arc::new(file)], shown: 1 }),
        }
    }

    /// The properties of each segment.
    pub(super) fn shape(&self) -> SegmentShape {
        self.shape
    }

    /// The segments, in order.
    pub(super) fn all(&self) -> Vec<Arc<OwnedFd>> {
        self.present.read().unwrap_or_else(PoisonError::into_inner).all.clone()
    }

    fn per(&self) -> usize {
        self.shape.entries as usize
    }

    /// Number of elements that exist.
    pub(super) fn len(&self) -> usize {
        self.per() * self.present.read().unwrap_or_else(PoisonError::into_inner).all.len()
    }

    /// Number of elements to which the map can grow.
    pub(super) fn most(&self) -> usize {
        if self.outer.is_some() { self.per() * SEGMENTS as usize } else { self.len() }
    }

    /// Creates segments until the map has `len` elements, and makes them visible to the programs; returns whether there were
    /// fewer before. `E2BIG` if the map cannot grow that far.
    pub(super) fn ensure(&self, len: usize) -> io::Result<bool> {
        let wanted = len.div_ceil(self.per());
        let mut present = self.present.write().unwrap_or_else(PoisonError::into_inner);
        let before = present.all.len();
        let Some((outer, folder)) = self.outer.as_ref().filter(|_| wanted <= SEGMENTS as usize) else {
            let is_there = wanted <= before;
            return if is_there { Ok(false) } else { Err(io::Error::from_raw_os_error(libc::E2BIG)) };
        };
        let mut failure = None;
        for number in before..wanted {
            let like = present.all.first().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let segment = open_or_create(folder, self.name, number, || {
                let (map, btf) = sys::definition(like.as_fd())?;
                MapData::create(map, self.name, btf.as_ref().map(|btf| btf.as_fd())).map_err(sys::io_error)
            });
            match segment.map(Arc::new) {
                Ok(segment) => {
                    note(pin_of(folder, self.name, number), &segment);
                    present.all.push(segment);
                }
                Err(error) => {
                    // What there was memory for is used.
                    failure = Some(error);
                    break;
                }
            }
        }
        // At first all of them: an agent that was killed may have left segments that no program sees.
        let (shown, all) = (present.shown, present.all.len());
        let numbers: Vec<u32> = (shown as u32..all as u32).collect();
        let fds: Vec<u32> = present.all.iter().skip(shown).map(|fd| fd.as_raw_fd().cast_unsigned()).collect();
        if let Err(stopped) = sys::update(outer.as_fd(), &numbers, &fds) {
            // Nothing may be written into segments that no program sees; the next call opens their pins.
            present.all.truncate(shown.max(1));
            return Err(stopped.source);
        }
        present.shown = all;
        failure.map_or(Ok(before < all), Err)
    }

    /// Waits until no program runs that has begun before this call. The kernel does so after each update of a map of maps.
    pub(super) fn wait(&self) -> io::Result<()> {
        let (Some((outer, _)), Some(first)) = (&self.outer, self.all().into_iter().next()) else {
            return Ok(());
        };
        sys::update_one(outer.as_fd(), 0u32, first.as_raw_fd().cast_unsigned())
    }

    /// Maps those of these elements that exist into memory.
    pub(super) fn map(&self, protection: ProtFlags, range: Range<usize>) -> io::Result<Mapping> {
        let segments = self.all();
        let pieces: Vec<BorrowedFd<'_>> = segments.iter().map(|segment| segment.as_fd()).collect();
        Mapping::pieces(protection, &pieces, self.per(), self.shape.value_size as usize, range)
    }

    /// Writes elements in order, as [`sys::update`] does. They must exist.
    pub(super) fn update<V: Plain>(&self, keys: &[u32], values: &[V]) -> Result<(), Stopped> {
        let (per, segments, mut before) = (self.shape.entries, self.all(), 0);
        for run in keys.chunk_by(|a, b| a / per == b / per) {
            let stopped = |done, source| Stopped { done: before + done, source };
            let segment = run.first().and_then(|key| segments.get((key / per) as usize));
            let segment = segment.ok_or_else(|| stopped(0, io::Error::from_raw_os_error(libc::E2BIG)))?;
            let local: Vec<u32> = run.iter().map(|key| key % per).collect();
            let part = values.get(before..before + run.len()).unwrap_or_default();
            sys::update(segment.as_fd(), &local, part)
                .map_err(|Stopped { done, source }| stopped(done, source))?;
            before += run.len();
        }
        Ok(())
    }

    /// Reads those elements of a range that exist.
    pub(super) fn lookup<V: Plain>(&self, range: Range<u32>) -> io::Result<Vec<(u32, V)>> {
        let (per, mut found) = (self.shape.entries, Vec::new());
        for (segment, base) in self.all().iter().zip((0..).step_by(per as usize)) {
            let (from, to) = (range.start.max(base) - base, range.end.saturating_sub(base).min(per));
            if from < to {
                let fd = segment.as_fd();
                let (rows, _) = sys::lookup::<u32, V>(fd, from.checked_sub(1), (to - from) as usize)?;
                found.extend(rows.into_iter().map(|(key, value)| (base + key, value)));
            }
        }
        found.retain(|(key, _)| range.contains(key));
        Ok(found)
    }
}

/// Notes a segment for [`repair`].
fn note(path: PathBuf, segment: &Arc<OwnedFd>) {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.insert(path, Arc::clone(segment));
}

/// Opens the pin of a segment, or creates the segment and pins it.
fn open_or_create(
    folder: &Path,
    name: &str,
    number: usize,
    create: impl FnOnce() -> io::Result<MapData>,
) -> io::Result<OwnedFd> {
    let path = pin_of(folder, name, number);
    if path.symlink_metadata().is_ok() {
        return MapData::from_pin(path).map_err(sys::io_error).and_then(|map| fd_of(&map));
    }
    let map = create()?;
    map.pin(path).map_err(io::Error::other)?;
    fd_of(&map)
}
