//! The commands of bpf(2) for links. aya cannot update a cgroup link in place, does not tell what a link is attached to, and
//! detaches on drop. Links that outlive the process need another behaviour in all three cases.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_link_type, bpf_prog_type};

use crate::host::devices::XdpMode;

/// Where a program runs among the other programs on a TCX hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// Before all other programs.
    First,
    /// After all other programs.
    Last,
}

impl Rank {
    /// Returns `BPF_F_BEFORE` or `BPF_F_AFTER`; without a reference they mean before or after all attached programs.
    const fn flag(self) -> u32 {
        match self {
            Self::First => aya_obj::generated::BPF_F_BEFORE,
            Self::Last => aya_obj::generated::BPF_F_AFTER,
        }
    }
}

/// Returns `XDP_FLAGS_DRV_MODE` or `XDP_FLAGS_SKB_MODE` of `include/uapi/linux/if_link.h`.
const fn xdp_flag(mode: XdpMode) -> u32 {
    match mode {
        XdpMode::Native => 1 << 2,
        XdpMode::Generic => 1 << 1,
    }
}

/// More programs than the kernel allows on one hook of a device.
const MAX_QUERIED: usize = 256;

/// Runs one command; `T` is the part of `union bpf_attr` that the command reads.
///
/// # Safety
/// `T` is `repr(C)`, has the layout that `command` asks for, and its pointers are valid for the sizes that it gives.
unsafe fn bpf<T>(command: bpf_cmd, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: the caller guarantees a valid attribute; the kernel reads and writes no more than its size.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_int, &raw mut *attr, size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// Runs one command that returns a new file descriptor.
///
/// # Safety
/// As [`bpf`], and `command` returns a file descriptor.
unsafe fn bpf_fd<T>(command: bpf_cmd, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees the same; the kernel has just returned the descriptor, and nothing else owns it.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, attr)?)) }
}

/// Returns a descriptor of the object with that id, by one of the commands `BPF_*_GET_FD_BY_ID`.
fn fd_by_id(command: bpf_cmd, id: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct ById {
        id: u32,
        next: u32,
        flags: u32,
    }
    let mut attr = ById { id, next: 0, flags: 0 };
    // SAFETY: three numbers, as these commands expect.
    unsafe { bpf_fd(command, &mut attr) }
}

/// A place where a program can be attached by a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    /// A socket hook of a cgroup.
    Cgroup {
        /// The cgroup's id: the inode number of its directory.
        id: u64,
        /// A `bpf_attach_type`.
        attach_type: u32,
    },
    /// A TCX hook of a device.
    Tcx {
        /// Index of the device in the network namespace that it was attached from; 0 if the device is gone.
        ifindex: u32,
        /// A `bpf_attach_type`.
        attach_type: u32,
    },
    /// The XDP hook of a device.
    Xdp {
        /// Index of the device in its network namespace; 0 if the device is gone.
        ifindex: u32,
    },
    /// A hook that Ballast does not use.
    Other,
}

/// The kernel's information about a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Its id.
    pub id: u32,
    /// Id of its program.
    pub program: u32,
    /// Where it is attached.
    pub hook: Hook,
}

/// A BPF link, by file descriptor. Dropping it detaches only when nothing else, such as a pin, refers to it.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Attaches `program` to a cgroup, next to other programs.
    pub fn to_cgroup(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>, attach_type: u32) -> io::Result<Self> {
        Self::create(program, cgroup.as_raw_fd().cast_unsigned(), attach_type, 0, None)
    }

    /// Attaches `program` to a device, before or after other programs.
    pub fn to_device(
        program: BorrowedFd<'_>,
        ifindex: u32,
        attach_type: u32,
        rank: Rank,
    ) -> io::Result<Self> {
        Self::create(program, ifindex, attach_type, rank.flag(), None)
    }

    /// Attaches `program` to the XDP hook of a device, which takes one program.
    pub fn to_xdp(program: BorrowedFd<'_>, ifindex: u32, mode: XdpMode) -> io::Result<Self> {
        Self::create(program, ifindex, bpf_attach_type::BPF_XDP as u32, xdp_flag(mode), None)
    }

    /// Creates a link with which [`Link::iterate`] runs an iterator program, over the elements of `map` if the program asks for one.
    pub fn to_iterator(program: BorrowedFd<'_>, map: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        Self::create(program, 0, bpf_attach_type::BPF_TRACE_ITER as u32, 0, map)
    }

    /// Returns a file with the output of the iterator program, for the network namespace of the calling thread. Each call
    /// starts a new iteration.
    pub fn iterate(&self) -> io::Result<File> {
        #[repr(C)]
        struct IterCreate {
            link: RawFd,
            flags: u32,
        }
        let mut attr = IterCreate { link: self.0.as_raw_fd(), flags: 0 };
        // SAFETY: two numbers, as the command expects.
        unsafe { bpf_fd(bpf_cmd::BPF_ITER_CREATE, &mut attr) }.map(File::from)
    }

    fn create(
        program: BorrowedFd<'_>,
        target: u32,
        attach_type: u32,
        flags: u32,
        map: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
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
        let map = map.map(|map| map.as_raw_fd());
        let mut attr = LinkCreate {
            program: program.as_raw_fd(),
            target,
            attach_type,
            flags,
            info: map.as_ref().map_or(0, |map| std::ptr::from_ref(map).addr() as u64),
            info_size: map.map_or(0, |_| size_of::<RawFd>() as u32),
            padding: 0,
        };
        // SAFETY: `link_create` with its `iter_info` arm, whose descriptor outlives the call. Zeros in the `tcx` arm mean no
        // reference, and for cgroups no cookie.
        unsafe { bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }.map(Self)
    }

    /// Returns the link pinned at `path`; `None` if nothing is pinned there, or an object that is not a link.
    pub fn pinned(path: &Path) -> io::Result<Option<Self>> {
        #[repr(C)]
        struct ObjGet {
            path: u64,
            fd: u32,
            flags: u32,
        }
        let name = CString::new(path.as_os_str().as_bytes())?;
        let mut attr = ObjGet { path: name.as_ptr() as u64, fd: 0, flags: 0 };
        // SAFETY: `name` outlives the call.
        let fd = match unsafe { bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut attr) } {
            Ok(fd) => fd,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // The information of maps and programs starts with the same fields; only this file distinguishes them from links.
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        Ok(text.lines().any(|line| line.starts_with("link_type:")).then_some(Self(fd)))
    }

    /// Returns the link with that id; needs `CAP_SYS_ADMIN`.
    pub fn by_id(id: u32) -> io::Result<Self> {
        fd_by_id(bpf_cmd::BPF_LINK_GET_FD_BY_ID, id).map(Self)
    }

    /// Returns the id, the program and the hook of the link.
    pub fn info(&self) -> io::Result<LinkInfo> {
        #[repr(C)]
        #[derive(Default)]
        struct Info {
            kind: u32,
            id: u32,
            program: u32,
            fill: u32,
            // The kernel's union: id and attach type of a cgroup link; index and attach type of a TCX link; index of an XDP
            // link.
            words: [u32; 12],
        }
        #[repr(C)]
        struct GetInfo {
            fd: RawFd,
            length: u32,
            info: u64,
        }
        let mut info = Info::default();
        let mut attr = GetInfo {
            fd: self.0.as_raw_fd(),
            length: size_of::<Info>() as u32,
            info: (&raw mut info) as u64,
        };
        // SAFETY: `info` has the given length and outlives the call.
        unsafe { bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)? };
        let [first, second, third, ..] = info.words;
        let hook = if info.kind == bpf_link_type::BPF_LINK_TYPE_CGROUP as u32 {
            let (low, high) = if cfg!(target_endian = "little") { (first, second) } else { (second, first) };
            Hook::Cgroup { id: u64::from(high) << 32 | u64::from(low), attach_type: third }
        } else if info.kind == bpf_link_type::BPF_LINK_TYPE_XDP as u32 {
            Hook::Xdp { ifindex: first }
        } else if info.kind == bpf_link_type::BPF_LINK_TYPE_TCX as u32 {
            Hook::Tcx { ifindex: first, attach_type: second }
        } else {
            Hook::Other
        };
        Ok(LinkInfo { id: info.id, program: info.program, hook })
    }

    /// Replaces the program without a moment in which no program runs.
    pub fn update(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        #[repr(C)]
        struct LinkUpdate {
            link: RawFd,
            program: RawFd,
            flags: u32,
            old_program: RawFd,
        }
        let mut attr =
            LinkUpdate { link: self.0.as_raw_fd(), program: program.as_raw_fd(), flags: 0, old_program: 0 };
        // SAFETY: four numbers, as the command expects.
        unsafe { bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr) }.map(drop)
    }

    /// Detaches the program, even if others refer to the link.
    pub fn detach(&self) -> io::Result<()> {
        let mut attr = self.0.as_raw_fd();
        // SAFETY: one number, as the command expects.
        unsafe { bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
    }

    /// Pins the link at `path`, where nothing may exist.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        #[repr(C)]
        struct ObjPin {
            path: u64,
            fd: RawFd,
            flags: u32,
        }
        let name = CString::new(path.as_os_str().as_bytes())?;
        let mut attr = ObjPin { path: name.as_ptr() as u64, fd: self.0.as_raw_fd(), flags: 0 };
        // SAFETY: `name` outlives the call.
        unsafe { bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(drop)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the ids of all links of the machine, in ascending order; needs `CAP_SYS_ADMIN`.
pub fn link_ids() -> impl Iterator<Item = io::Result<u32>> {
    #[repr(C)]
    struct NextId {
        start: u32,
        next: u32,
        flags: u32,
    }
    let mut last = Some(0);
    std::iter::from_fn(move || {
        let mut attr = NextId { start: last?, next: 0, flags: 0 };
        // SAFETY: three numbers, as the command expects.
        match unsafe { bpf(bpf_cmd::BPF_LINK_GET_NEXT_ID, &mut attr) } {
            Ok(_) => {
                last = Some(attr.next);
                Some(Ok(attr.next))
            }
            Err(error) => {
                last = None;
                (error.kind() != io::ErrorKind::NotFound).then_some(Err(error))
            }
        }
    })
}

/// Returns the ids of the links on a TCX hook of a device of this network namespace, in the order in which they run.
///
/// `EINVAL` means that the kernel has no TCX (older than 6.6, or built without it).
pub fn tcx_links(ifindex: u32, attach_type: u32) -> io::Result<Vec<u32>> {
    let mut links = tcx_places(ifindex, attach_type)?;
    links.retain(|id| *id != 0);
    Ok(links)
}

/// Returns the same ids, with a 0 for each program that was attached without a link.
pub fn tcx_places(ifindex: u32, attach_type: u32) -> io::Result<Vec<u32>> {
    #[repr(C)]
    struct Query {
        ifindex: u32,
        attach_type: u32,
        flags: u32,
        attach_flags: u32,
        programs: u64,
        count: u32,
        fill: u32,
        program_flags: u64,
        links: u64,
        link_flags: u64,
        revision: u64,
    }
    let mut programs = [0u32; MAX_QUERIED];
    let mut links = [0u32; MAX_QUERIED];
    let mut attr = Query {
        ifindex,
        attach_type,
        flags: 0,
        attach_flags: 0,
        programs: programs.as_mut_ptr() as u64,
        count: MAX_QUERIED as u32,
        fill: 0,
        program_flags: 0,
        links: links.as_mut_ptr() as u64,
        link_flags: 0,
        revision: 0,
    };
    // SAFETY: both arrays hold `count` elements and outlive the call.
    match unsafe { bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr) } {
        Ok(_) => Ok(links.into_iter().take(attr.count as usize).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Whether the kernel has TCX; queries the loopback device, which every network namespace has. `None`: the kernel does not
/// permit this process to ask.
pub fn has_tcx() -> Option<bool> {
    match tcx_links(1, bpf_attach_type::BPF_TCX_INGRESS as u32) {
        Ok(_) => Some(true),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
        Err(_) => Some(false),
    }
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
