//! The BPF object inside this binary.

/// The BPF object inside this binary; empty if the binary was built without one.
pub static EMBEDDED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ballast.bpf.o"));

/// Lets the kernel reclaim the memory of [`EMBEDDED`]. The kernel reads it from this program's file again when it is needed:
/// for a device without link-layer header, or to list sockets.
pub fn release_object() {
    let (page, start) = (rustix::param::page_size(), EMBEDDED.as_ptr().addr());
    let (first, end) = (start.next_multiple_of(page), (start + EMBEDDED.len()) / page * page);
    if first < end {
        let address = EMBEDDED.as_ptr().wrapping_add(first - start).cast_mut().cast();
        // SAFETY: whole pages of a constant, which are never written: the kernel reads the same bytes from the file again.
        // If the call fails, the pages stay in memory.
        let _ = unsafe { rustix::mm::madvise(address, end - first, rustix::mm::Advice::LinuxDontNeed) };
    }
}
