//! An array map of which only the part in use is mapped into this process's memory.
//!
//! When a `BPF_F_MMAPABLE` array is mapped, the kernel puts every page of the mapping into the page table (`array_map_mmap`
//! in kernel/bpf/arraymap.c), and counts it as resident memory of the process. But of the arrays that the agent writes
//! without system calls, a change touches only a page or two.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::ProtFlags;

use super::mapping::Mapping;
use super::segments::Segments;

/// Bytes that are mapped at once, which takes a few microseconds.
const SPAN: usize = 64 * 1024;
/// Bytes of the largest window that is kept; more than `SPAN`, as an element may cross a page boundary, and the first page
/// is mapped from its start.
const KEPT: usize = 2 * SPAN;
/// Moves within one run after which the whole array is mapped.
const MOVES: u32 = 8;

/// An array map, which may grow.
pub(super) struct Array {
    map: Segments,
    /// The window of the last run. The next run often writes near it, and mmap(2) costs more than the writes.
    kept: Mutex<Option<Mapping>>,
}

impl Array {
    /// Returns an array; fails at once if the map cannot be mapped.
    pub(super) fn new(map: Segments) -> io::Result<Self> {
        let array = Self { map, kept: Mutex::default() };
        array.map(0..1)?;
        Ok(array)
    }

    /// Number of elements that exist.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Number of elements to which the array can grow.
    pub(super) fn most(&self) -> usize {
        self.map.most()
    }

    /// Lets the array grow to this number of elements.
    pub(super) fn ensure(&self, len: usize) -> io::Result<()> {
        self.map.ensure(len).map(drop)
    }

    /// Maps those of these elements that exist.
    pub(super) fn map(&self, range: Range<usize>) -> io::Result<Mapping> {
        self.map.map(ProtFlags::READ | ProtFlags::WRITE, range)
    }

    /// Maps all elements.
    pub(super) fn map_all(&self) -> io::Result<Mapping> {
        self.map(0..self.len())
    }

    /// Returns the windows for one run of reads and writes.
    pub(super) fn windows(&self) -> Windows<'_> {
        Windows { array: self, current: self.kept().take(), moves: 0 }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Mapping>> {
        // A panic leaves no partial value: the window is stored and taken as a whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mapped part of an array, which moves to the elements that are needed. When it is dropped, at most one window stays
/// mapped.
pub(super) struct Windows<'a> {
    array: &'a Array,
    current: Option<Mapping>,
    moves: u32,
}

impl Windows<'_> {
    /// Returns a mapping with at least these elements; the array grows if it is shorter, and `E2BIG` means that it cannot.
    pub(super) fn at(&mut self, range: Range<usize>) -> io::Result<&Mapping> {
        if range.end > self.array.len() {
            self.array.map.ensure(range.end)?;
        }
        let current = match self.current.take().filter(|known| known.holds(&range)) {
            Some(known) => known,
            None => self.move_to(range)?,
        };
        Ok(self.current.insert(current))
    }

    fn move_to(&mut self, range: Range<usize>) -> io::Result<Mapping> {
        self.moves += 1;
        if self.moves > MOVES {
            return self.array.map_all();
        }
        let more = SPAN / (self.array.map.shape().value_size as usize).next_multiple_of(8);
        self.array.map(range.start..range.end.max(range.start + more))
    }
}

impl Drop for Windows<'_> {
    fn drop(&mut self) {
        *self.array.kept() = self.current.take().filter(|window| window.bytes() <= KEPT);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::os::fd::OwnedFd;
    use std::sync::atomic::Ordering::Relaxed;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// Returns an array of `len` elements of eight bytes, in a file in memory.
    pub(in crate::maps) fn array(name: &str, len: usize) -> (OwnedFd, Array) {
        let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8 * len as u64).unwrap();
        let array = Array::new(Segments::plain(file.try_clone().unwrap(), 4, len as u32)).unwrap();
        (file, array)
    }

    /// Returns the bytes of the file that are mapped into this process.
    pub(in crate::maps) fn mapped(name: &str) -> usize {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let ours = maps.lines().filter(|line| line.contains(&format!("/memfd:{name}")));
        let size = |line: &str| {
            let (start, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
            usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap()
        };
        ours.map(size).sum()
    }

    #[test]
    fn only_what_was_used_last_is_mapped() {
        const LEN: usize = 1 << 20;
        let (_file, array) = array("windows-small", LEN);
        assert_eq!((array.len(), mapped("windows-small")), (LEN, 0));
        let mut windows = array.windows();
        windows.at(500_000..500_010).unwrap().word32(500_003, 0).unwrap().store(7, Relaxed);
        assert!((1..=SPAN + 2 * 4096).contains(&mapped("windows-small")), "{}", mapped("windows-small"));
        // Elements near the first ones need no other mapping; elements outside of the mapping cannot be reached.
        let near = windows.at(500_900..500_901).unwrap();
        assert_eq!(near.range32(500_003..500_005), [7, 0]);
        assert!(near.word32(LEN - 1, 0).is_none() && near.word32(0, 0).is_none());
        assert_eq!(windows.moves, 1);
        windows.at(LEN - 1..LEN).unwrap().word64(LEN - 1).unwrap().store(8, Relaxed);
        assert_eq!(windows.moves, 2);
        assert!(mapped("windows-small") <= SPAN + 2 * 4096, "the first one is gone");
        assert_eq!(windows.at(LEN - 1..LEN + 1).err().and_then(|e| e.raw_os_error()), Some(libc::E2BIG));
        drop(windows);
        let mut windows = array.windows();
        windows.at(LEN - 1..LEN).unwrap();
        assert_eq!(windows.moves, 0, "the last window was kept");
        windows.at(0..1).unwrap();
        drop(windows);
        assert!((1..=SPAN + 2 * 4096).contains(&mapped("windows-small")), "{}", mapped("windows-small"));
        let all = array.map_all().unwrap().all64();
        assert_eq!((all.len(), all[500_003], all[LEN - 1], all.iter().sum::<u64>()), (LEN, 7, 8, 15));
    }

    #[test]
    fn a_run_that_jumps_has_the_whole_array_in_the_end() {
        const LEN: usize = 1 << 18;
        let (_file, array) = array("windows-jumps", LEN);
        let mut windows = array.windows();
        for round in 0..100 {
            let at = (round * 99_991) % LEN;
            windows.at(at..at + 1).unwrap().word32(at, 0).unwrap().fetch_add(1, Relaxed);
        }
        assert!(windows.moves <= MOVES + 1, "{}", windows.moves);
        assert_eq!(mapped("windows-jumps"), 8 * LEN);
        drop(windows);
        assert_eq!(mapped("windows-jumps"), 0, "the whole is not kept");
        assert_eq!(array.map_all().unwrap().all32().iter().sum::<u32>(), 100);
    }

    #[test]
    fn elements_that_lie_across_pages_are_reached_as_a_whole() {
        let file = memfd_create("windows-odd", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 24 * 10_000).unwrap();
        let array = Array::new(Segments::plain(file, 20, 10_000)).unwrap();
        for index in [0, 169, 170, 171, 5000, 9_999] {
            let window = array.map(index..index + 1).unwrap();
            window.word64_at(index, 16).unwrap().store(index as u64, Relaxed);
            assert!(index < 200 || window.word64(index - 200).is_none());
        }
        let all = array.map_all().unwrap();
        for index in [0, 169, 170, 171, 5000, 9_999] {
            assert_eq!(all.word64_at(index, 16).unwrap().load(Relaxed), index as u64);
        }
    }
}
