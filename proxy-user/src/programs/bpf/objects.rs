//! The commands of bpf(2) for maps and programs that are in no object file, and for a link to the elements of a map.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};

use super::{Link, bpf_fd, fd_by_id};

/// Creates an array map; with `BPF_F_MMAPABLE`, if it is to be mapped.
pub fn make_array(name: &str, value_size: u32, max_entries: u32, mapped: bool) -> io::Result<OwnedFd> {
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
    let mut attr = MapCreate {
        map_type: aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
        key_size: size_of::<u32>() as u32,
        value_size,
        max_entries,
        map_flags: if mapped { aya_obj::generated::BPF_F_MMAPABLE } else { 0 },
        inner_map: 0,
        numa_node: 0,
        name: [0; NAME],
    };
    for (to, from) in attr.name.iter_mut().take(NAME - 1).zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: `map_create` up to its name.
    unsafe { bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr) }
}

/// Returns the program with that id; needs `CAP_SYS_ADMIN`.
pub fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    fd_by_id(bpf_cmd::BPF_PROG_GET_FD_BY_ID, id)
}

/// Returns the id of a program.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Loads a packet program that passes each packet to the next program.
pub fn pass_on() -> io::Result<OwnedFd> {
    #[repr(C)]
    struct ProgLoad {
        program_type: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
    }
    // mov32 r0, -1 (TCX_NEXT); exit. Both instructions use no register but r0, so the order of bits does not matter.
    let instructions: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    let mut attr = ProgLoad {
        program_type: bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS as u32,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: *b"tc_pass_on\0\0\0\0\0\0",
    };
    // SAFETY: the first part of the structure that the command reads; instructions and license outlive the call.
    unsafe { bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) }
}

impl Link {
    /// Creates a link with which [`Link::iterate`] runs an iterator program over the elements of a map.
    pub fn to_map_iterator(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<Self> {
        #[repr(C)]
        struct LinkCreate {
            program: RawFd,
            target: u32,
            attach_type: u32,
            flags: u32,
            info: u64,
            info_size: u32,
            padding: u32,
        }
        let map = map.as_raw_fd();
        let mut attr = LinkCreate {
            program: program.as_raw_fd(),
            target: 0,
            attach_type: bpf_attach_type::BPF_TRACE_ITER as u32,
            flags: 0,
            info: (&raw const map).addr() as u64,
            info_size: size_of::<RawFd>() as u32,
            padding: 0,
        };
        // SAFETY: `link_create` with its `iter_info` arm, a map's descriptor, which outlives the call.
        unsafe { bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }.map(Self)
    }
}
