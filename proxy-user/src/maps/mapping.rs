//! An array map or its segments, or a part of them, mapped into this process's memory.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use proxy_common::abi::Plain;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

/// The elements of a `BPF_F_MMAPABLE` array. Each starts at a multiple of eight bytes (`array_map_alloc` in
/// kernel/bpf/arraymap.c rounds them up).
pub(super) struct Mapping {
    start: NonNull<u8>,
    /// Bytes that are mapped.
    bytes: usize,
    /// Bytes of the array before the mapped ones: whole pages.
    before: usize,
    stride: usize,
    /// Elements of the array.
    len: usize,
    /// The elements that are mapped.
    there: Range<usize>,
}

// SAFETY: the memory belongs to the kernel's map, not to a thread, and is only touched through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all `len` elements of `value_size` bytes of a file.
    #[cfg(test)]
    pub(super) fn new(fd: BorrowedFd<'_>, value_size: usize, len: usize) -> io::Result<Self> {
        Self::pieces(ProtFlags::READ | ProtFlags::WRITE, &[fd], len, value_size, 0..len)
    }

    /// Maps the pages that hold `range`, cut at the end of the array, which consists of arrays of `per` elements each: one
    /// behind the other in memory. It does not map the whole array because each mapped page of a `BPF_F_MMAPABLE` array
    /// counts as resident memory from then on, whether it is read or not. If `protection` has no `WRITE`, a store into the
    /// mapping ends the process.
    pub(super) fn pieces(
        protection: ProtFlags,
        pieces: &[BorrowedFd<'_>],
        per: usize,
        value_size: usize,
        range: Range<usize>,
    ) -> io::Result<Self> {
        let (page, stride, len) = (page_size(), value_size.next_multiple_of(8), per * pieces.len());
        let end = range.end.min(len);
        let before = stride * range.start.min(end) / page * page;
        let bytes = stride * end - before;
        let (address, reserved) = (std::ptr::null_mut(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap_anonymous(address, bytes, ProtFlags::empty(), reserved) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // Whole elements only: the first page may start in the middle of an element.
        let there = before.div_ceil(stride)..end;
        let mapping = Self { start, bytes, before, stride, len, there };
        for (fd, first) in pieces.iter().zip((0..).step_by((stride * per).max(1))) {
            let (from, to) = (first.max(before), (first + stride * per).min(before + bytes));
            if from < to {
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                // SAFETY: these pages are inside the mapping that was reserved above, and not in use yet.
                unsafe {
                    let at = mapping.start.as_ptr().add(from - before).cast();
                    mmap(at, to - from, protection, flags, fd, (from - first) as u64)
                }?;
            }
        }
        Ok(mapping)
    }

    /// Number of elements of the array.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Number of bytes that are mapped.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether all elements of `range` are mapped.
    pub(super) fn holds(&self, range: &Range<usize>) -> bool {
        self.there.start <= range.start && range.end <= self.there.end
    }

    fn at(&self, index: usize, offset: usize) -> Option<*mut u8> {
        let position = index.checked_mul(self.stride)?.checked_add(offset)?.checked_sub(self.before)?;
        // SAFETY: an element of `there` lies inside the mapping, and so does an offset inside the element.
        (self.there.contains(&index) && offset < self.stride)
            .then(|| unsafe { self.start.as_ptr().add(position) })
    }

    /// Returns the 32-bit word number `word` of an element; `None` outside of the mapping.
    pub(super) fn word32(&self, index: usize, word: usize) -> Option<&AtomicU32> {
        // SAFETY: inside the mapping, aligned (pages, strides of 8, words of 4), and only used through atomics.
        self.at(index, word * 4).map(|p| unsafe { AtomicU32::from_ptr(p.cast()) })
    }

    /// Returns the first 64 bits of an element; `None` outside of the mapping.
    pub(super) fn word64(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: as in `word32`, with the alignment of a stride.
        self.at(index, 0).map(|p| unsafe { AtomicU64::from_ptr(p.cast()) })
    }

    /// Returns the 64 bits at `offset`, a multiple of eight, of an element; `None` outside of the mapping.
    pub(super) fn word64_at(&self, index: usize, offset: usize) -> Option<&AtomicU64> {
        let at = self.at(index, offset).filter(|_| offset.is_multiple_of(8));
        // SAFETY: as in `word64`; an offset that is not a multiple of eight was refused.
        at.map(|p| unsafe { AtomicU64::from_ptr(p.cast()) })
    }

    /// Returns the byte at `offset` of an element; `None` outside of the mapping.
    pub(super) fn byte(&self, index: usize, offset: usize) -> Option<u8> {
        let word = self.word32(index, offset / 4)?.load(Ordering::Relaxed);
        word.to_ne_bytes().get(offset % 4).copied()
    }

    /// Returns a copy of an element; `None` outside of the mapping. A copy made while the kernel writes may mix old and new
    /// words, like a copy made by a system call.
    pub(super) fn read<V: Plain>(&self, index: usize) -> Option<V> {
        const { assert!(size_of::<V>().is_multiple_of(4), "elements are read by words") };
        if size_of::<V>() > self.stride {
            return None;
        }
        let mut value = MaybeUninit::<V>::uninit();
        for word in 0..size_of::<V>() / 4 {
            let bits = self.word32(index, word)?.load(Ordering::Relaxed);
            // SAFETY: inside the value, whose size is a multiple of a word.
            unsafe { value.as_mut_ptr().cast::<u32>().add(word).write_unaligned(bits) };
        }
        // SAFETY: every byte was written, and every bit pattern is a value of a `Plain` type.
        Some(unsafe { value.assume_init() })
    }

    /// Returns the first 32-bit word of every mapped element.
    pub(super) fn all32(&self) -> Vec<u32> {
        self.range32(self.there.clone())
    }

    /// Returns the first 32-bit word of those elements of a range that are mapped.
    pub(super) fn range32(&self, range: Range<usize>) -> Vec<u32> {
        let there = range.start..range.end.min(self.there.end);
        there.filter_map(|i| self.word32(i, 0)).map(|w| w.load(Ordering::Relaxed)).collect()
    }

    /// Returns the first 64 bits of every mapped element.
    pub(super) fn all64(&self) -> Vec<u64> {
        self.range64(self.there.clone())
    }

    /// Returns the first 64 bits of those elements of a range that are mapped.
    pub(super) fn range64(&self, range: Range<usize>) -> Vec<u64> {
        let there = range.start..range.end.min(self.there.end);
        there.filter_map(|i| self.word64(i)).map(|w| w.load(Ordering::Relaxed)).collect()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole of the mapping that `pieces` made, and no reference into it outlives `self`.
        // Nothing can be done about a failure.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
