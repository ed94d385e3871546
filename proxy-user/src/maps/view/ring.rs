//! A `BPF_MAP_TYPE_RINGBUF` with any number of readers.
//!
//! The kernel knows one reader: it overwrites nothing after the position that this reader has published. Here each reader
//! keeps a position of its own, and moves the published one only forward, so the fastest reader decides what may be
//! overwritten. It publishes a position behind its own, so that the last quarter of the ring stays readable: new readers
//! begin with this history. A slower reader notices what it has missed: it copies a record, and then checks how far the
//! kernel has written.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use aya_obj::generated::{BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT, BPF_RINGBUF_HDR_SZ};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;

/// Bytes in front of each record: its length and flags, and the offset of its page.
const HEADER: usize = BPF_RINGBUF_HDR_SZ as usize;
/// Bytes before the end that may be overwritten already: the kernel writes the header of the next record before it publishes
/// its position.
const MARGIN: usize = 128;

/// The history is the ring divided by this.
const HISTORY: usize = 4;

/// Bytes of a record of so many words of four bytes, with its header.
const fn record_size(words: usize) -> usize {
    (HEADER + 4 * words).next_multiple_of(8)
}

/// A mapping that is unmapped when it is dropped.
struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to the kernel's map, not to a thread, and is only touched through atomics.
unsafe impl Send for Pages {}

impl Pages {
    fn new(fd: BorrowedFd<'_>, offset: usize, bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, offset as u64) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, bytes })
    }

    /// Returns the position at the start of the first page.
    fn position(&self) -> &AtomicUsize {
        // SAFETY: a page is mapped there, and both sides use it atomically (`unsigned long` in kernel/bpf/ringbuf.c).
        unsafe { AtomicUsize::from_ptr(self.start.as_ptr().cast()) }
    }

    /// Returns the 32 bits at `offset`, a multiple of four; `None` outside of the mapping.
    fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let fits = offset.is_multiple_of(4) && offset.checked_add(4)? <= self.bytes;
        // SAFETY: inside the mapping, aligned, and only used through atomics.
        fits.then(|| unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of the mapping that `new` made. Nothing can be done about a failure.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A reader of a ring whose records are all of one size.
pub(super) struct Ring {
    consumer: Pages,
    producer: Pages,
    page: usize,
    size: usize,
    position: usize,
    missed: u64,
}

impl Ring {
    /// Maps a ring of `size` bytes. Reading starts with the history.
    pub(super) fn new(fd: BorrowedFd<'_>, size: usize) -> io::Result<Self> {
        let page = page_size();
        let consumer = Pages::new(fd, 0, page, ProtFlags::READ | ProtFlags::WRITE)?;
        // The data is mapped twice in a row, so that each record is contiguous.
        let producer = Pages::new(fd, page, page + 2 * size, ProtFlags::READ)?;
        let position = consumer.position().load(Ordering::Acquire);
        Ok(Self { consumer, producer, page, size, position, missed: 0 })
    }

    /// Skips the history.
    pub(super) fn skip_history(&mut self) {
        self.position = self.producer.position().load(Ordering::Acquire);
    }

    /// Returns the next record, as words; `None` if there is none yet. Records of another length are skipped.
    pub(super) fn next<const WORDS: usize>(&mut self) -> Option<[u32; WORDS]> {
        loop {
            let written = self.producer.position().load(Ordering::Acquire);
            if self.position >= written {
                self.position = written;
                return None;
            }
            if self.is_overwritten() {
                self.skip(WORDS);
                continue;
            }
            let start = self.page + self.position % self.size;
            let header = self.producer.word(start)?.load(Ordering::Acquire);
            if header & BPF_RINGBUF_BUSY_BIT != 0 && !self.is_overwritten() {
                return None;
            }
            let mut record = [0; WORDS];
            for (number, word) in record.iter_mut().enumerate() {
                *word = self.producer.word(start + HEADER + 4 * number)?.load(Ordering::Relaxed);
            }
            fence(Ordering::SeqCst);
            if self.is_overwritten() {
                self.skip(WORDS);
                continue;
            }
            let length = (header & !(BPF_RINGBUF_BUSY_BIT | BPF_RINGBUF_DISCARD_BIT)) as usize;
            self.position += (HEADER + length).next_multiple_of(8);
            // All records have one size, so the position before the history is the start of a record.
            let history = self.size / HISTORY / record_size(WORDS) * record_size(WORDS);
            self.consumer.position().fetch_max(self.position.saturating_sub(history), Ordering::AcqRel);
            if header & BPF_RINGBUF_DISCARD_BIT == 0 && length == 4 * WORDS {
                return Some(record);
            }
        }
    }

    /// Returns the number of records that were overwritten before this reader read them.
    pub(super) fn missed(&self) -> u64 {
        self.missed
    }

    /// Whether the kernel may have overwritten the record at this reader's position.
    fn is_overwritten(&self) -> bool {
        let ahead = self.producer.position().load(Ordering::Acquire).wrapping_sub(self.position);
        ahead > self.size - MARGIN && self.consumer.position().load(Ordering::Acquire) > self.position
    }

    /// Moves to the position of the fastest reader.
    fn skip(&mut self, words: usize) {
        let next = self.consumer.position().load(Ordering::Acquire);
        self.missed += (next.saturating_sub(self.position) / record_size(words)) as u64;
        self.position = next;
    }
}
