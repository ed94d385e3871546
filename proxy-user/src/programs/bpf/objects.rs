//! The commands of bpf(2) for maps and programs that are in no object file, and for a link to the elements of a map.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};

use super::{Link, bpf_fd};

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
