//! The BPF object inside this binary.

/// The BPF object inside this binary; empty when it was built without one.
pub static EMBEDDED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ballast.bpf.o"));

/// Lets the kernel take back the memory of [`EMBEDDED`], which is read from this program's file again when it is needed
/// again: for a device without link-layer header, or to list sockets.
pub fn release_object() {
    let (page, start) = (rustix::param::page_size(), EMBEDDED.as_ptr().addr());
    let (first, end) = (start.next_multiple_of(page), (start + EMBEDDED.len()) / page * page);
    if first < end {
        let address = EMBEDDED.as_ptr().wrapping_add(first - start).cast_mut().cast();
        // SAFETY: whole pages of a constant, which are never written: the kernel reads the same bytes from the file again.
        // A failure leaves them where they are.
        let _ = unsafe { rustix::mm::madvise(address, end - first, rustix::mm::Advice::LinuxDontNeed) };
    }
}
