//! bpf(2): the call itself, and the commands for maps that aya does not have.

use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::{fs, io};

use aya::maps::{MapData, MapError};
use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_map_info, bpf_map_type};
use proxy_common::abi::Plain;

/// A batch that stopped in the middle.
pub(super) struct Stopped {
    /// Number of elements that were done.
    pub(super) done: usize,
    /// Why the next element was not.
    pub(super) source: io::Error,
}

/// Returns an attribute of bpf(2) that is zero: the caller sets the fields that differ.
pub fn attr() -> bpf_attr {
    // SAFETY: a union of numbers, for which zeros are valid.
    unsafe { zeroed() }
}

/// Runs a command of bpf(2), and returns its result.
///
/// # Safety
/// `attr` began as [`attr`], and its pointers are valid for what the command reads and writes.
pub unsafe fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<RawFd> {
    // SAFETY: the caller guarantees the pointers; the kernel reads and writes no more of `attr` than its size.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command as libc::c_int, &raw mut *attr, size_of::<bpf_attr>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// Runs a command of bpf(2) that returns a new file descriptor.
///
/// # Safety
/// As [`bpf`], and `command` returns a file descriptor.
pub unsafe fn bpf_fd(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees the same; the kernel has just returned the descriptor, and nothing else owns it.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, attr)?)) }
}

/// Returns the name of a map or a program as the kernel keeps it: up to 15 bytes, and a zero.
pub fn kernel_name(name: &str) -> [libc::c_char; 16] {
    let mut kept = [0; 16];
    for (to, from) in kept.iter_mut().take(15).zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    kept
}

/// Returns a descriptor of the object with this id, by one of the commands `BPF_*_GET_FD_BY_ID`.
pub(crate) fn fd_by_id(command: bpf_cmd, id: u32) -> io::Result<OwnedFd> {
    let mut attr = attr();
    attr.__bindgen_anon_6.__bindgen_anon_1.start_id = id;
    // SAFETY: these commands read numbers, and return a descriptor.
    unsafe { bpf_fd(command, &mut attr) }
}

/// Reads what the kernel tells about an object; `T` is the structure for objects of its kind.
///
/// # Safety
/// `T` consists of numbers and unions of numbers.
pub(crate) unsafe fn info<T>(object: BorrowedFd<'_>) -> io::Result<T> {
    // SAFETY: zeros are valid numbers.
    let mut info: T = unsafe { zeroed() };
    let mut attr = attr();
    attr.info.bpf_fd = object.as_raw_fd().cast_unsigned();
    attr.info.info_len = size_of::<T>() as u32;
    attr.info.info = (&raw mut info) as u64;
    // SAFETY: `info` has the given length and outlives the call.
    unsafe { bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }.map(|_| info)
}

/// Returns the error of the system call that failed, or an error without a number.
pub(crate) fn io_error(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

/// Returns the mount point of the bpffs of a pin: the nearest ancestor whose parent is on another file system.
pub(crate) fn mount_point(pin: &Path) -> PathBuf {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    // The pin may not exist yet.
    let real = pin.ancestors().find_map(|path| fs::canonicalize(path).ok()).unwrap_or_else(|| pin.to_owned());
    let is_mount = |path: &&Path| path.parent().is_none_or(|above| device(above) != device(path));
    real.ancestors().find(is_mount).unwrap_or(&real).to_owned()
}

/// `BPF_FS_MAGIC` of `include/uapi/linux/magic.h`.
const BPF_FS_MAGIC: rustix::fs::FsWord = 0xcafe_4a11;
/// The way out if the agent's maps are on another bpffs.
pub(crate) const GIVE_BPFFS: &str =
    "give the mount point that the agent uses with --bpffs; in a container, mount the host's BPF file system";

/// Whether a bpffs is mounted at `path`.
pub fn is_bpffs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == BPF_FS_MAGIC)
}

/// Returns the sentence about a bpffs that is not mounted.
pub(crate) fn no_bpffs(path: &Path) -> String {
    format!("no BPF file system is mounted at {}: pinned maps and programs cannot be read", path.display())
}

/// Returns the sentence about a bpffs that is mounted read-only.
pub(crate) fn read_only(mount: &Path) -> String {
    let mount = mount.display();
    format!(
        "{mount} is mounted read-only; mount it read-write (`mount -o remount,rw {mount}`), or give another bpffs with --bpffs"
    )
}

/// Opens the map that is pinned in `folder` by this name.
pub(super) fn pinned(folder: &Path, name: &str) -> io::Result<MapData> {
    MapData::from_pin(folder.join(name)).map_err(io::Error::other)
}

/// Creates a map of maps with this number of elements, for maps like `inner`.
pub(super) fn create_outer(name: &str, max_entries: u32, inner: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = attr();
    attr.__bindgen_anon_1.map_name = kernel_name(name);
    attr.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    attr.__bindgen_anon_1.key_size = size_of::<u32>() as u32;
    attr.__bindgen_anon_1.value_size = size_of::<u32>() as u32;
    attr.__bindgen_anon_1.max_entries = max_entries;
    attr.__bindgen_anon_1.inner_map_fd = inner.as_raw_fd().cast_unsigned();
    // SAFETY: the command reads numbers, and returns a descriptor.
    unsafe { bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr) }
}

/// Loads type information into the kernel.
pub fn load_btf(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = attr();
    attr.__bindgen_anon_7.btf = bytes.as_ptr() as u64;
    attr.__bindgen_anon_7.btf_size = bytes.len() as u32;
    // SAFETY: the bytes outlive the call, which returns a descriptor.
    unsafe { bpf_fd(bpf_cmd::BPF_BTF_LOAD, &mut attr) }
}

/// Returns what a further map like this one needs: its properties, and its type information if it has some and the kernel
/// lets this process have it.
pub(crate) fn definition(map: BorrowedFd<'_>) -> io::Result<(aya_obj::Map, Option<OwnedFd>)> {
    // SAFETY: a structure of numbers.
    let mut info: bpf_map_info = unsafe { info(map) }?;
    let btf = match info.btf_id {
        0 => None,
        id => match fd_by_id(bpf_cmd::BPF_BTF_GET_FD_BY_ID, id) {
            // The kernel asks for CAP_SYS_ADMIN, which an agent in a container does not have.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => None,
            btf => Some(btf?),
        },
    };
    if btf.is_none() {
        (info.btf_key_type_id, info.btf_value_type_id) = (0, 0);
    }
    Ok((aya_obj::parse_map_info(info, aya_obj::maps::PinningType::None), btf))
}

/// Runs a batch command, whose buffers hold `count` elements; returns the number that the kernel left there, and the result.
/// `place` is where a lookup begins, and where the kernel writes where the next one begins.
///
/// # Safety
/// The pointers are valid for `count` elements of the map; null stands for a buffer that the command does not use.
unsafe fn batch<K, V, P>(
    command: bpf_cmd,
    fd: BorrowedFd<'_>,
    (keys, values): (*const K, *const V),
    count: usize,
    place: (*const P, *mut P),
) -> (usize, io::Result<()>) {
    let mut attr = attr();
    attr.batch.map_fd = fd.as_raw_fd().cast_unsigned();
    attr.batch.keys = keys as u64;
    attr.batch.values = values as u64;
    attr.batch.count = count as u32;
    attr.batch.in_batch = place.0 as u64;
    attr.batch.out_batch = place.1 as u64;
    // SAFETY: the caller guarantees the pointers. The count is a number.
    unsafe {
        let result = bpf(command, &mut attr);
        (attr.batch.count as usize, result.map(drop))
    }
}

/// Runs a batch command that changes elements; `values` is null if they are removed.
///
/// # Safety
/// `values` is valid for as many elements as there are keys, or null.
unsafe fn change<K, V>(
    command: bpf_cmd,
    fd: BorrowedFd<'_>,
    keys: &[K],
    values: *const V,
) -> Result<(), Stopped> {
    let place = (null::<u32>(), null_mut());
    // SAFETY: the keys outlive the call, and the caller guarantees the values.
    let (count, result) = unsafe { batch(command, fd, (keys.as_ptr(), values), keys.len(), place) };
    // If the kernel refused the whole batch, it leaves the count unchanged.
    let done = if count >= keys.len() { 0 } else { count };
    result.map_err(|source| Stopped { done, source })
}

/// Writes elements in order; `keys` and `values` have the same length. The map's keys are `K`, its values `V`.
pub(super) fn update<K: Plain, V: Plain>(
    fd: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> Result<(), Stopped> {
    let count = keys.len().min(values.len());
    match keys.get(..count) {
        // SAFETY: there are at least `count` values, which outlive the call.
        Some(keys) if count > 0 => unsafe {
            change(bpf_cmd::BPF_MAP_UPDATE_BATCH, fd, keys, values.as_ptr())
        },
        _ => Ok(()),
    }
}

/// Writes one element. In a map of maps, the kernel then waits until no program runs that has begun before.
pub(super) fn update_one<K: Plain, V: Plain>(fd: BorrowedFd<'_>, key: K, value: V) -> io::Result<()> {
    let mut attr = attr();
    attr.__bindgen_anon_2.map_fd = fd.as_raw_fd().cast_unsigned();
    attr.__bindgen_anon_2.key = (&raw const key) as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw const value) as u64;
    // SAFETY: key and value outlive the call, and have the sizes of the map's.
    unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// Removes elements of a hash map in order; an element that does not exist counts as removed.
pub(super) fn delete<K: Plain>(fd: BorrowedFd<'_>, keys: &[K]) -> Result<(), Stopped> {
    let mut from = 0;
    while let Some(rest) = keys.get(from..).filter(|rest| !rest.is_empty()) {
        // SAFETY: the command takes no values.
        match unsafe { change(bpf_cmd::BPF_MAP_DELETE_BATCH, fd, rest, null::<u8>()) } {
            Ok(()) => break,
            Err(Stopped { done, source }) if source.raw_os_error() == Some(libc::ENOENT) => from += done + 1,
            Err(Stopped { done, source }) => return Err(Stopped { done: from + done, source }),
        }
    }
    Ok(())
}

/// Elements that one system call asks for.
const CHUNK: usize = 8192;

/// Elements, and where the next read continues: as a result, `None` means that these were the last; as an argument, `None`
/// means the start. It is the index that was read last in an array, a bucket in a hash map, the key that was read last in a trie.
pub(super) type Part<K, V, P = u32> = (Vec<(K, V)>, Option<P>);

/// Reads elements of an array or a hash map in the map's own order until there are `enough` of them or none is left. Elements that
/// are added or removed meanwhile may be returned.
pub(super) fn lookup<K: Plain, V: Plain>(
    fd: BorrowedFd<'_>,
    from: Option<u32>,
    enough: usize,
) -> io::Result<Part<K, V>> {
    lookup_after(fd, from, enough)
}

/// As [`lookup`], from a map of any kind. If the key at which a read of a trie continues was removed, the kernel begins again at
/// the start.
pub(super) fn lookup_after<K: Plain, V: Plain, P: Plain + PartialEq>(
    fd: BorrowedFd<'_>,
    from: Option<P>,
    enough: usize,
) -> io::Result<Part<K, V, P>> {
    let mut found = Vec::new();
    let next = batches(fd, from, (CHUNK, enough), 1, |keys: &[K], values: &[V]| {
        found.extend(keys.iter().copied().zip(values.iter().copied()));
    })?;
    Ok((found, next))
}

/// Counts the elements of a map, by the rules of [`lookup`].
pub(super) fn count<K: Plain, V: Plain>(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count = 0;
    batches(fd, None::<u32>, (CHUNK, usize::MAX), 1, |keys: &[K], _: &[V]| count += keys.len())?;
    Ok(count)
}

/// Bytes of values that one system call reads from a per-CPU array.
const PER_CPU_BYTES: usize = 1 << 20;

/// Passes the elements of a per-CPU array below `end` to `take`: the index, and the values of all `cpus`. Reads many
/// elements with one system call.
pub(super) fn lookup_per_cpu<V: Plain>(
    fd: BorrowedFd<'_>,
    end: u32,
    cpus: usize,
    mut take: impl FnMut(u32, &[V]),
) -> io::Result<()> {
    // The kernel rounds the value of each CPU up to eight bytes.
    const { assert!(size_of::<V>().is_multiple_of(8)) };
    let chunk = (PER_CPU_BYTES / (cpus * size_of::<V>())).max(1);
    batches(fd, None::<u32>, (chunk, end as usize), cpus, |keys: &[u32], values| {
        keys.iter().zip(values.chunks_exact(cpus)).for_each(|(key, values)| take(*key, values));
    })
    .map(drop)
}

/// Passes the elements of a map to `take` in batches of `chunk`, until there are `enough` of them or none is left; `from` and
/// the result are as in [`Part`]. Each key has `per` values.
fn batches<K: Plain, V: Plain, P: Plain + PartialEq>(
    fd: BorrowedFd<'_>,
    from: Option<P>,
    (chunk, enough): (usize, usize),
    per: usize,
    mut take: impl FnMut(&[K], &[V]),
) -> io::Result<Option<P>> {
    let mut chunk = chunk.min(enough);
    let (mut keys, mut values) = (Vec::<K>::new(), Vec::<V>::new());
    // The kernel's position in the map: four bytes for arrays and hash maps, a key for tries.
    let mut place = from;
    let mut found = 0;
    while found < enough {
        keys.clear();
        values.clear();
        keys.reserve_exact(chunk);
        values.reserve_exact(chunk * per);
        let mut next = MaybeUninit::<P>::zeroed();
        let places = (place.as_ref().map_or(null(), std::ptr::from_ref), next.as_mut_ptr());
        let buffers = (keys.as_mut_ptr().cast_const(), values.as_mut_ptr().cast_const());
        // SAFETY: both buffers have the capacity for `chunk` elements, and outlive the call like the two places.
        let (count, result) = unsafe { batch(bpf_cmd::BPF_MAP_LOOKUP_BATCH, fd, buffers, chunk, places) };
        let end = match result {
            Ok(()) => false,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => true,
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => {
                // One bucket of the hash map holds more elements than were asked for.
                chunk *= 2;
                continue;
            }
            Err(error) => return Err(error),
        };
        let count = count.min(chunk);
        // SAFETY: the kernel filled `count` keys and their values, within the capacity, and both types are `Plain`.
        unsafe {
            keys.set_len(count);
            values.set_len(count * per);
        }
        // SAFETY: it is zero or what the kernel wrote, and every bit pattern is a valid value.
        let next = unsafe { next.assume_init() };
        take(&keys, &values);
        found += count;
        if end || (count == 0 && place == Some(next)) {
            return Ok(None);
        }
        place = Some(next);
    }
    Ok(place)
}
