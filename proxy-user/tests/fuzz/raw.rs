//! System calls that aya does not offer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use aya_obj::generated::{bpf_attr, bpf_cmd};
use proxy_user::maps::sys::{attr, bpf};

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// Runs a packet program once. Returns its verdict and the length of the packet in `out`.
pub fn test_run(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: &[u8],
    is_complete: bool,
    out: &mut [u8],
) -> io::Result<(i32, usize)> {
    let mut attr = attr();
    attr.test.prog_fd = program.as_raw_fd().cast_unsigned();
    attr.test.data_size_in = packet.len() as u32;
    attr.test.data_size_out = out.len() as u32;
    attr.test.data_in = packet.as_ptr() as u64;
    attr.test.data_out = out.as_mut_ptr() as u64;
    attr.test.repeat = 1;
    attr.test.ctx_size_in = context.len() as u32;
    attr.test.ctx_in = context.as_ptr() as u64;
    attr.test.flags = if is_complete { CHECKSUM_COMPLETE } else { 0 };
    // SAFETY: packet, context and `out` have the given lengths, and outlive the call, which writes two numbers.
    unsafe {
        bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
        Ok((attr.test.retval.cast_signed(), attr.test.data_size_out as usize))
    }
}

fn batch(map: BorrowedFd<'_>, keys: u64, values: u64, count: usize) -> bpf_attr {
    let mut attr = attr();
    attr.batch.keys = keys;
    attr.batch.values = values;
    attr.batch.count = count as u32;
    attr.batch.map_fd = map.as_raw_fd().cast_unsigned();
    attr
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
    attr.batch.out_batch = next.as_mut_ptr() as u64;
    // SAFETY: the buffers have the lengths of `count` elements.
    match unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) } {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
        _ => {}
    }
    // SAFETY: a number.
    let count = unsafe { attr.batch.count } as usize;
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
    // SAFETY: the buffers hold `count` elements.
    unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut batch(map, keys, values, elements.count)) }.map(drop)
}

/// Removes elements that exist from a hash map.
pub fn remove(map: BorrowedFd<'_>, elements: &Elements) -> io::Result<()> {
    if elements.count == 0 {
        return Ok(());
    }
    let mut attr = batch(map, elements.keys.as_ptr() as u64, 0, elements.count);
    // SAFETY: the buffer holds `count` keys.
    unsafe { bpf(bpf_cmd::BPF_MAP_DELETE_BATCH, &mut attr) }.map(drop)
}
