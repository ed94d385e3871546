//! Another `sock_ops` program on the same cgroup keeps its callbacks.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use aya_obj::generated::{BPF_F_ALLOW_MULTI, bpf_attach_type, bpf_cmd, bpf_map_type, bpf_prog_type};
use proxy_user::maps::sys::{attr, bpf, bpf_fd};

use super::{Case, tcp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::Service;

/// With two endpoints, Ballast watches connections.
const TWO: Service = Service { name: "two", number: 62, ports: &[tcp(80, 8080, &[0, 1])] };

pub const CASES: &[Case] = &[Case {
    name: "sock_ops::another_program_keeps_its_callbacks",
    wish: Wish { pods: 2, services: &[TWO], flags: SMALL },
    run: keeps,
}];

/// Returns an instruction: operation, registers (destination, source), offset, immediate.
fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> u64 {
    u64::from(code)
        | u64::from(dst | src << 4) << 8
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(immediate.cast_unsigned()) << 32
}

/// Loads a program that asks for callbacks about state changes when a socket connects, and counts them in `map`.
fn load(map: BorrowedFd<'_>) -> io::Result<OwnedFd> {
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
    let mut attr = attr();
    attr.__bindgen_anon_3.prog_type = bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS as u32;
    attr.__bindgen_anon_3.insn_cnt = program.len() as u32;
    attr.__bindgen_anon_3.insns = program.as_ptr() as u64;
    attr.__bindgen_anon_3.license = c"GPL".as_ptr() as u64;
    // SAFETY: instructions and license outlive the call, which returns a descriptor.
    unsafe { bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) }
}

fn keeps(fixture: &Fixture) -> Result<()> {
    let map = aya_obj::Map::new_from_params(bpf_map_type::BPF_MAP_TYPE_ARRAY as u32, 4, 8, 1, 0);
    let map = MapData::create(map, "counter", None).context("map")?;
    let program = load(map.fd().as_fd()).context("program")?;
    let map = Array::<_, u64>::try_from(Map::Array(map))?;
    let cgroup = std::fs::File::open(fixture.cgroup())?;
    // The cgroup disappears with the fixture.
    let mut attr = attr();
    attr.__bindgen_anon_5.__bindgen_anon_1.target_fd = cgroup.as_raw_fd().cast_unsigned();
    attr.__bindgen_anon_5.attach_bpf_fd = program.as_raw_fd().cast_unsigned();
    attr.__bindgen_anon_5.attach_type = bpf_attach_type::BPF_CGROUP_SOCK_OPS as u32;
    attr.__bindgen_anon_5.attach_flags = BPF_F_ALLOW_MULTI;
    // SAFETY: the command reads numbers.
    unsafe { bpf(bpf_cmd::BPF_PROG_ATTACH, &mut attr) }.context("attach")?;
    let count = || map.get(&0, 0);
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
