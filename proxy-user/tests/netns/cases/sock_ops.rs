//! Another `sock_ops` program on the same cgroup keeps its callbacks.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, ensure};

use super::{Case, tcp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::manifest::{Family, Service};
use crate::peer::{Attempt, SocketKind};

/// With two endpoints, Ballast watches connections.
const TWO: Service = Service { name: "two", number: 62, ports: &[tcp(80, 8080, &[0, 1])] };

pub const CASES: &[Case] = &[Case {
    name: "sock_ops::another_program_keeps_its_callbacks",
    wish: Wish { pods: 2, services: &[TWO], flags: SMALL },
    run: keeps,
}];

/// Commands of `bpf(2)`.
const MAP_CREATE: libc::c_long = 0;
const MAP_LOOKUP: libc::c_long = 1;
const PROG_LOAD: libc::c_long = 5;
const PROG_ATTACH: libc::c_long = 8;

/// The members of `union bpf_attr` that are used here, as words of 32 bits.
type Attr = [u32; 32];

fn bpf(command: libc::c_long, attr: &mut Attr) -> io::Result<i64> {
    // SAFETY: a zeroed `bpf_attr` whose pointers are valid during the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_mut_ptr(), size_of::<Attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn fd(command: libc::c_long, attr: &mut Attr) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)? as i32;
    // SAFETY: the kernel has just returned the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pointer(attr: &mut Attr, at: usize, pointer: u64) {
    attr[at] = pointer as u32;
    attr[at + 1] = (pointer >> 32) as u32;
}

/// Returns an instruction: operation, registers (destination, source), offset, immediate.
fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> u64 {
    u64::from(code)
        | u64::from(dst | src << 4) << 8
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(immediate.cast_unsigned()) << 32
}

/// Loads a program that asks for callbacks about state changes when a socket connects, and counts them in `map`.
fn load(map: &OwnedFd) -> io::Result<OwnedFd> {
    // Offsets in `struct bpf_sock_ops`: `op` 0, `bpf_sock_ops_cb_flags` 84. Events: 3 TCP_CONNECT_CB, 10 STATE_CB.
    let program = [
        insn(0xbf, 6, 1, 0, 0),               // r6 = context
        insn(0x61, 2, 6, 0, 0),               // r2 = op
        insn(0x55, 2, 0, 5, 3),               // if r2 != TCP_CONNECT_CB goto +5
        insn(0x61, 2, 6, 84, 0),              // r2 = cb_flags
        insn(0x47, 2, 0, 0, 4),               // r2 |= STATE_CB_FLAG
        insn(0xbf, 1, 6, 0, 0),               // r1 = context
        insn(0x85, 0, 0, 0, 59),              // bpf_sock_ops_cb_flags_set
        insn(0x05, 0, 0, 10, 0),              // goto end
        insn(0x55, 2, 0, 9, 10),              // if r2 != STATE_CB goto end
        insn(0x62, 10, 0, -4, 0),             // key on the stack = 0
        insn(0x18, 1, 1, 0, map.as_raw_fd()), // r1 = map
        insn(0, 0, 0, 0, 0),
        insn(0xbf, 2, 10, 0, 0), // r2 = frame pointer
        insn(0x07, 2, 0, 0, -4), // r2 += -4
        insn(0x85, 0, 0, 0, 1),  // bpf_map_lookup_elem
        insn(0x15, 0, 0, 2, 0),  // if r0 == 0 goto end
        insn(0xb7, 1, 0, 0, 1),  // r1 = 1
        insn(0xdb, 0, 1, 0, 0),  // atomic *(u64 *)r0 += r1
        insn(0xb7, 0, 0, 0, 1),  // end: r0 = 1
        insn(0x95, 0, 0, 0, 0),  // return
    ];
    let license = c"GPL";
    let mut attr = Attr::default();
    attr[0] = 13; // BPF_PROG_TYPE_SOCK_OPS
    attr[1] = program.len() as u32;
    pointer(&mut attr, 2, program.as_ptr() as u64);
    pointer(&mut attr, 4, license.as_ptr() as u64);
    fd(PROG_LOAD, &mut attr)
}

fn keeps(fixture: &Fixture) -> Result<()> {
    let mut attr = Attr::default();
    attr[..4].copy_from_slice(&[2, 4, 8, 1]); // an array of one counter
    let map = fd(MAP_CREATE, &mut attr).context("map")?;
    let program = load(&map).context("program")?;
    let cgroup = std::fs::File::open(fixture.cgroup())?;
    let mut attr = Attr::default();
    // BPF_CGROUP_SOCK_OPS, BPF_F_ALLOW_MULTI; the cgroup disappears with the fixture.
    attr[..4].copy_from_slice(&[
        cgroup.as_raw_fd().cast_unsigned(),
        program.as_raw_fd().cast_unsigned(),
        3,
        2,
    ]);
    bpf(PROG_ATTACH, &mut attr).context("attach")?;
    let count = || -> Result<u64> {
        let (key, mut value) = (0u32, 0u64);
        let mut attr = Attr::default();
        attr[0] = map.as_raw_fd().cast_unsigned();
        pointer(&mut attr, 2, (&raw const key) as u64);
        pointer(&mut attr, 4, (&raw mut value) as u64);
        bpf(MAP_LOOKUP, &mut attr)?;
        Ok(value)
    };
    for family in Family::BOTH {
        let before = count()?;
        fixture.local.reach(Attempt::new(SocketKind::Tcp, vip(family, TWO, SocketKind::Tcp)))?;
        // To SYN_SENT or ESTABLISHED, and then at least to FIN_WAIT1, FIN_WAIT2 or CLOSING, and CLOSE.
        eventually(SOON, || {
            let seen = count()? - before;
            ensure!(seen >= 4, "{family:?}: {seen} state changes");
            Ok(())
        })?;
    }
    Ok(())
}
