//! Batch operations on map elements, for which aya has no calls.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::maps::{MapData, MapError};
use aya_obj::generated::bpf_map_info;
use proxy_common::abi::Plain;

/// `BPF_MAP_LOOKUP_BATCH`, `BPF_MAP_UPDATE_BATCH`, `BPF_MAP_DELETE_BATCH` of `enum bpf_cmd` (uapi/linux/bpf.h).
const LOOKUP_BATCH: libc::c_long = 24;
const UPDATE_BATCH: libc::c_long = 26;
const DELETE_BATCH: libc::c_long = 27;

/// The `batch` member of `union bpf_attr` (uapi/linux/bpf.h).
#[repr(C)]
struct Attr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// A batch that stopped in the middle.
pub(super) struct Stopped {
    /// Number of elements that were done.
    pub(super) done: usize,
    /// Why the next element was not.
    pub(super) source: io::Error,
}

/// Runs a command, and returns its result; `T` is the part of `union bpf_attr` that it reads, with valid buffers.
fn run<T>(command: libc::c_long, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a valid `bpf_attr` of the size given; the callers make sure that its buffers are valid.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Runs a command that creates a file descriptor.
fn new_fd<T>(command: libc::c_long, attr: &mut T) -> io::Result<OwnedFd> {
    let fd = run(command, attr)?;
    // SAFETY: a new descriptor of ours; the kernel sets `O_CLOEXEC`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn bpf(command: libc::c_long, attr: &mut Attr) -> io::Result<()> {
    run(command, attr).map(drop)
}

fn attr(fd: BorrowedFd<'_>, keys: u64, values: u64, count: usize) -> Attr {
    Attr {
        in_batch: 0,
        out_batch: 0,
        keys,
        values,
        count: count as u32,
        map_fd: fd.as_raw_fd().cast_unsigned(),
        elem_flags: 0,
        flags: 0,
    }
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
    /// `BPF_MAP_CREATE` of `enum bpf_cmd`.
    const CREATE: libc::c_long = 0;
    /// The kernel keeps 15 bytes of a name, and a zero.
    const NAME: usize = 16;
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        map_flags: u32,
        inner_map: u32,
        numa_node: u32,
        name: [u8; NAME],
    }
    let word = size_of::<u32>() as u32;
    let mut attr = MapCreate {
        map_type: aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32,
        key_size: word,
        value_size: word,
        max_entries,
        map_flags: 0,
        inner_map: inner.as_raw_fd().cast_unsigned(),
        numa_node: 0,
        name: [0; NAME],
    };
    for (to, from) in attr.name.iter_mut().take(NAME - 1).zip(name.bytes()) {
        *to = from;
    }
    new_fd(CREATE, &mut attr)
}

/// Loads type information into the kernel.
pub(crate) fn load_btf(bytes: &[u8]) -> io::Result<OwnedFd> {
    /// `BPF_BTF_LOAD` of `enum bpf_cmd`.
    const LOAD: libc::c_long = 18;
    #[repr(C)]
    struct BtfLoad {
        bytes: u64,
        log: u64,
        size: u32,
        log_size: u32,
        log_level: u32,
        padding: u32,
    }
    let size = bytes.len() as u32;
    let mut attr =
        BtfLoad { bytes: bytes.as_ptr() as u64, log: 0, size, log_size: 0, log_level: 0, padding: 0 };
    new_fd(LOAD, &mut attr)
}

/// Returns what a further map like this one needs: its properties, and its type information if it has some and the kernel
/// lets this process have it.
pub(crate) fn definition(map: BorrowedFd<'_>) -> io::Result<(aya_obj::Map, Option<OwnedFd>)> {
    /// `BPF_OBJ_GET_INFO_BY_FD` and `BPF_BTF_GET_FD_BY_ID` of `enum bpf_cmd`.
    const INFO: libc::c_long = 15;
    const BTF_BY_ID: libc::c_long = 19;
    #[repr(C)]
    struct GetInfo {
        fd: u32,
        size: u32,
        info: u64,
    }
    #[repr(C)]
    struct ById {
        id: u32,
        next: u32,
        flags: u32,
    }
    // SAFETY: a structure of numbers, for which zeros are valid.
    let mut info: bpf_map_info = unsafe { std::mem::zeroed() };
    let mut attr = GetInfo {
        fd: map.as_raw_fd().cast_unsigned(),
        size: size_of::<bpf_map_info>() as u32,
        info: &raw mut info as u64,
    };
    run(INFO, &mut attr)?;
    let btf = match info.btf_id {
        0 => None,
        id => match new_fd(BTF_BY_ID, &mut ById { id, next: 0, flags: 0 }) {
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

/// Returns how many elements of a batch the kernel did. If the kernel refused the whole batch, it leaves `count` unchanged.
fn done(attr: &Attr, asked: usize) -> usize {
    let count = attr.count as usize;
    if count >= asked { 0 } else { count }
}

/// Writes elements in order; `keys` and `values` have the same length. The map's keys are `K`, its values `V`.
pub(super) fn update<K: Plain, V: Plain>(
    fd: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> Result<(), Stopped> {
    let count = keys.len().min(values.len());
    if count == 0 {
        return Ok(());
    }
    let mut attr = attr(fd, keys.as_ptr() as u64, values.as_ptr() as u64, count);
    bpf(UPDATE_BATCH, &mut attr).map_err(|source| Stopped { done: done(&attr, count), source })
}

/// Writes one element. In a map of maps, the kernel then waits until no program runs that has begun before.
pub(super) fn update_one<K: Plain, V: Plain>(fd: BorrowedFd<'_>, key: K, value: V) -> io::Result<()> {
    /// `BPF_MAP_UPDATE_ELEM` of `enum bpf_cmd`.
    const UPDATE: libc::c_long = 2;
    #[repr(C)]
    struct Element {
        map_fd: u32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut attr = Element {
        map_fd: fd.as_raw_fd().cast_unsigned(),
        padding: 0,
        key: &raw const key as u64,
        value: &raw const value as u64,
        flags: 0,
    };
    run(UPDATE, &mut attr).map(drop)
}

/// Removes elements of a hash map in order; an element that does not exist counts as removed.
pub(super) fn delete<K: Plain>(fd: BorrowedFd<'_>, keys: &[K]) -> Result<(), Stopped> {
    let mut from = 0;
    while let Some(rest) = keys.get(from..).filter(|rest| !rest.is_empty()) {
        let mut attr = attr(fd, rest.as_ptr() as u64, 0, rest.len());
        match bpf(DELETE_BATCH, &mut attr) {
            Ok(()) => break,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => from += done(&attr, rest.len()) + 1,
            Err(source) => return Err(Stopped { done: from + done(&attr, rest.len()), source }),
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
    let next = batches(fd, from, enough, |keys: &[K], values: &[V]| {
        found.extend(keys.iter().copied().zip(values.iter().copied()));
    })?;
    Ok((found, next))
}

/// Counts the elements of a map, by the rules of [`lookup`].
pub(super) fn count<K: Plain, V: Plain>(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count = 0;
    batches(fd, None::<u32>, usize::MAX, |keys: &[K], _: &[V]| count += keys.len())?;
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
    let chunk = (PER_CPU_BYTES / (cpus * size_of::<V>())).clamp(1, (end as usize).max(1));
    let (mut keys, mut values) = (Vec::<u32>::with_capacity(chunk), Vec::<V>::with_capacity(chunk * cpus));
    let mut place: Option<u32> = None;
    loop {
        keys.clear();
        values.clear();
        let mut next = 0u32;
        let mut attr = attr(fd, keys.as_mut_ptr() as u64, values.as_mut_ptr() as u64, chunk);
        attr.in_batch = place.as_ref().map_or(0, |place| std::ptr::from_ref(place) as u64);
        attr.out_batch = (&raw mut next) as u64;
        let is_end = match bpf(LOOKUP_BATCH, &mut attr) {
            Ok(()) => false,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) => return Err(error),
        };
        let count = (attr.count as usize).min(chunk);
        // SAFETY: the kernel filled `count` keys, and the values of all CPUs for each, within the capacity; both types are
        // `Plain`.
        unsafe {
            keys.set_len(count);
            values.set_len(count * cpus);
        }
        for (key, values) in keys.iter().zip(values.chunks_exact(cpus)).filter(|(key, _)| **key < end) {
            take(*key, values);
        }
        if is_end || count == 0 || keys.last().is_none_or(|last| last + 1 >= end) {
            return Ok(());
        }
        place = Some(next);
    }
}

/// Passes the elements of a map to `take` in batches, until there are `enough` of them or none is left; `from` and the
/// result are as in [`Part`].
fn batches<K: Plain, V: Plain, P: Plain + PartialEq>(
    fd: BorrowedFd<'_>,
    from: Option<P>,
    enough: usize,
    mut take: impl FnMut(&[K], &[V]),
) -> io::Result<Option<P>> {
    let mut chunk = CHUNK.min(enough);
    let (mut keys, mut values) = (Vec::<K>::with_capacity(chunk), Vec::<V>::with_capacity(chunk));
    // The kernel's position in the map: four bytes for arrays and hash maps, a key for tries.
    let mut place = from;
    let mut found = 0;
    while found < enough {
        keys.clear();
        values.clear();
        keys.reserve_exact(chunk);
        values.reserve_exact(chunk);
        let mut next = MaybeUninit::<P>::zeroed();
        let mut attr = attr(fd, keys.as_mut_ptr() as u64, values.as_mut_ptr() as u64, chunk);
        attr.in_batch = place.as_ref().map_or(0, |place| std::ptr::from_ref(place) as u64);
        attr.out_batch = next.as_mut_ptr() as u64;
        let end = match bpf(LOOKUP_BATCH, &mut attr) {
            Ok(()) => false,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => true,
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => {
                // One bucket of the hash map holds more elements than were asked for.
                chunk *= 2;
                continue;
            }
            Err(error) => return Err(error),
        };
        let count = (attr.count as usize).min(chunk);
        // SAFETY: the kernel filled `count` keys and values, within the capacity, and both types are `Plain`.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
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
