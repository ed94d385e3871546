//! System calls that aya does not offer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `enum bpf_cmd` (uapi/linux/bpf.h).
const PROG_TEST_RUN: libc::c_long = 10;
const LOOKUP_BATCH: libc::c_long = 24;
const UPDATE_BATCH: libc::c_long = 26;
const DELETE_BATCH: libc::c_long = 27;

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// The `test` member of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    reserved: u32,
}

/// The `batch` member of `union bpf_attr`.
#[repr(C)]
#[expect(clippy::struct_field_names, reason = "the kernel's names")]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<()> {
    // SAFETY: `attr` is a valid part of `union bpf_attr`, with the size given; the callers ensure that its pointers are valid.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs a packet program once. Returns its verdict and the length of the packet in `out`.
pub fn test_run(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: &[u8],
    is_complete: bool,
    out: &mut [u8],
) -> io::Result<(i32, usize)> {
    let mut attr = TestRun {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        data_size_in: packet.len() as u32,
        data_size_out: out.len() as u32,
        data_in: packet.as_ptr() as u64,
        data_out: out.as_mut_ptr() as u64,
        repeat: 1,
        ctx_size_in: context.len() as u32,
        ctx_in: context.as_ptr() as u64,
        flags: if is_complete { CHECKSUM_COMPLETE } else { 0 },
        ..TestRun::default()
    };
    bpf(PROG_TEST_RUN, &mut attr)?;
    Ok((attr.retval.cast_signed(), attr.data_size_out as usize))
}

fn batch(map: BorrowedFd<'_>, keys: u64, values: u64, count: usize) -> Batch {
    Batch {
        in_batch: 0,
        out_batch: 0,
        keys,
        values,
        count: count as u32,
        map_fd: map.as_raw_fd().cast_unsigned(),
        elem_flags: 0,
        flags: 0,
    }
}

/// Keys and values of elements as bytes, one after the other.
#[derive(Default)]
pub struct Elements {
    pub count: usize,
    pub keys: Vec<u8>,
    pub values: Vec<u8>,
}

/// Reads up to `count` elements, with keys and values of these sizes.
pub fn read(map: BorrowedFd<'_>, count: usize, key: usize, value: usize) -> io::Result<Elements> {
    let (mut keys, mut values) = (vec![0; count * key], vec![0; count * value]);
    let mut attr = batch(map, keys.as_mut_ptr() as u64, values.as_mut_ptr() as u64, count);
    // The kernel writes here where the next batch would begin; this needs the size of a key.
    let mut next = [0u64; 8];
    attr.out_batch = next.as_mut_ptr() as u64;
    match bpf(LOOKUP_BATCH, &mut attr) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
        _ => {}
    }
    let count = attr.count as usize;
    keys.truncate(count * key);
    values.truncate(count * value);
    Ok(Elements { count, keys, values })
}

/// Writes elements to a map.
pub fn write(map: BorrowedFd<'_>, elements: &Elements) -> io::Result<()> {
    if elements.count == 0 {
        return Ok(());
    }
    let (keys, values) = (elements.keys.as_ptr() as u64, elements.values.as_ptr() as u64);
    bpf(UPDATE_BATCH, &mut batch(map, keys, values, elements.count))
}

/// Removes elements that exist from a hash map.
pub fn remove(map: BorrowedFd<'_>, elements: &Elements) -> io::Result<()> {
    if elements.count == 0 {
        return Ok(());
    }
    bpf(DELETE_BATCH, &mut batch(map, elements.keys.as_ptr() as u64, 0, elements.count))
}
