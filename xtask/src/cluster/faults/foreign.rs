//! Foreign programs on the hooks that Ballast uses: each passes everything, and is detached when the process ends.

use std::io;
use std::os::fd::AsRawFd as _;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::host;

/// The device with Ballast's programs.
const DEVICE: &std::ffi::CStr = c"eth0";
/// How long a foreign program stays attached.
const STAY: Duration = Duration::from_millis(500);

/// `enum bpf_cmd`.
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
/// Generic XDP, in the stack and not in the driver: `XDP_FLAGS_SKB_MODE`.
const SKB_MODE: u32 = 2;

/// A hook: numbers of `enum bpf_prog_type` and `enum bpf_attach_type`, and the return value with which a program passes.
#[derive(Debug)]
pub(super) struct Hook {
    kind: u32,
    attach: u32,
    returns: i32,
    flags: u32,
    on_cgroup: bool,
}

impl Hook {
    /// Names of the hooks on the command line.
    pub(super) const ALL: [&'static str; 4] = ["tcx_ingress", "tcx_egress", "connect4", "xdp"];

    fn of(name: &str) -> Result<Self> {
        let device = |attach| Self { kind: 3, attach, returns: -1, flags: 0, on_cgroup: false };
        Ok(match name {
            "tcx_ingress" => device(46),
            "tcx_egress" => device(47),
            "connect4" => Self { kind: 18, attach: 10, returns: 1, flags: 0, on_cgroup: true },
            "xdp" => Self { kind: 6, attach: 37, returns: 2, flags: SKB_MODE, on_cgroup: false },
            _ => bail!("no hook `{name}`; there are {}", Self::ALL.join(", ")),
        })
    }
}

/// The start of `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    device: u32,
    attach: u32,
}

/// The start of `union bpf_attr` for `BPF_LINK_CREATE`; `rest` is zero.
#[repr(C)]
#[derive(Default)]
struct Link {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
    rest: [u64; 6],
}

/// Runs `cluster foreign`: attaches a program to a hook of the machine that it runs on, and detaches the program after a moment.
pub fn attach(hook: &str) -> Result<()> {
    let hook = Hook::of(hook)?;
    // r0 = the verdict; exit.
    let mut code = [0xb7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
    code[4..8].copy_from_slice(&hook.returns.to_le_bytes());
    let license = c"GPL";
    let load = Load {
        kind: hook.kind,
        instructions: 2,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        name: *b"foreign\0\0\0\0\0\0\0\0\0",
        attach: hook.attach,
        ..Load::default()
    };
    let program = bpf(PROG_LOAD, &load).context("cannot load a program")?;
    let group;
    let target = if hook.on_cgroup {
        group = std::fs::File::open(host::cgroup2()?).context("cannot open the control group")?;
        group.as_raw_fd().cast_unsigned()
    } else {
        // SAFETY: the name is a string that ends with a zero byte.
        unsafe { libc::if_nametoindex(DEVICE.as_ptr()) }
    };
    let link = Link { program, target, attach: hook.attach, flags: hook.flags, ..Link::default() };
    bpf(LINK_CREATE, &link).context("cannot attach a program")?;
    // The process ends after this, and the kernel removes its link.
    sleep(STAY);
    Ok(())
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<u32> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of the attributes, and the memory that they point to is still allocated.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    u32::try_from(fd).map_err(|_| io::Error::last_os_error())
}
