//! The commands of bpf(2) for links. aya cannot update a cgroup link in place, does not tell what a link is attached to, and
//! detaches on drop. Links that outlive the process need another behaviour in all three cases.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_link_info, bpf_link_type, bpf_prog_type};

use crate::host::devices::XdpMode;
use crate::maps::sys::{self, bpf, bpf_fd};

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
        let mut attr = sys::attr();
        attr.iter_create.link_fd = raw(self.0.as_fd());
        // SAFETY: the command reads numbers, and returns a descriptor.
        unsafe { bpf_fd(bpf_cmd::BPF_ITER_CREATE, &mut attr) }.map(File::from)
    }

    fn create(
        program: BorrowedFd<'_>,
        target: u32,
        attach_type: u32,
        flags: u32,
        map: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        let map = map.map(raw);
        let mut attr = sys::attr();
        attr.link_create.__bindgen_anon_1.prog_fd = raw(program);
        attr.link_create.__bindgen_anon_2.target_fd = target;
        attr.link_create.attach_type = attach_type;
        attr.link_create.flags = flags;
        if let Some(map) = &map {
            attr.link_create.__bindgen_anon_3.__bindgen_anon_1.iter_info = std::ptr::from_ref(map) as u64;
            attr.link_create.__bindgen_anon_3.__bindgen_anon_1.iter_info_len = size_of::<u32>() as u32;
        }
        // SAFETY: `map` outlives the call: it is the kernel's union `bpf_iter_link_info`, cut after its map. Zeros in the
        // `tcx` arm mean no reference, and for cgroups no cookie.
        unsafe { bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr) }.map(Self)
    }

    /// Returns the link pinned at `path`; `None` if nothing is pinned there, or there is something else.
    pub fn pinned(path: &Path) -> io::Result<Option<Self>> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let mut attr = sys::attr();
        attr.__bindgen_anon_4.pathname = name.as_ptr() as u64;
        // SAFETY: `name` outlives the call, which returns a descriptor.
        let fd = match unsafe { bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut attr) } {
            Ok(fd) => fd,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(_) if path.is_dir() => return Ok(None),
            Err(error) => return Err(error),
        };
        // The information of maps and programs starts with the same fields; only this file distinguishes them from links.
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        Ok(text.lines().any(|line| line.starts_with("link_type:")).then_some(Self(fd)))
    }

    /// Returns the link with that id; needs `CAP_SYS_ADMIN`.
    pub fn by_id(id: u32) -> io::Result<Self> {
        sys::fd_by_id(bpf_cmd::BPF_LINK_GET_FD_BY_ID, id).map(Self)
    }

    /// Returns the id, the program and the hook of the link.
    pub fn info(&self) -> io::Result<LinkInfo> {
        const CGROUP: u32 = bpf_link_type::BPF_LINK_TYPE_CGROUP as u32;
        const XDP: u32 = bpf_link_type::BPF_LINK_TYPE_XDP as u32;
        const TCX: u32 = bpf_link_type::BPF_LINK_TYPE_TCX as u32;
        // SAFETY: a structure of numbers.
        let info: bpf_link_info = unsafe { sys::info(self.0.as_fd()) }?;
        // SAFETY: the kernel has filled the arm of this type, which consists of numbers.
        let hook = unsafe {
            let arm = &info.__bindgen_anon_1;
            match info.type_ {
                CGROUP => Hook::Cgroup { id: arm.cgroup.cgroup_id, attach_type: arm.cgroup.attach_type },
                XDP => Hook::Xdp { ifindex: arm.xdp.ifindex },
                TCX => Hook::Tcx { ifindex: arm.tcx.ifindex, attach_type: arm.tcx.attach_type },
                _ => Hook::Other,
            }
        };
        Ok(LinkInfo { id: info.id, program: info.prog_id, hook })
    }

    /// Replaces the program without a moment in which no program runs.
    pub fn update(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let mut attr = sys::attr();
        attr.link_update.link_fd = raw(self.0.as_fd());
        attr.link_update.__bindgen_anon_1.new_prog_fd = raw(program);
        // SAFETY: the command reads numbers.
        unsafe { bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr) }.map(drop)
    }

    /// Detaches the program, even if others refer to the link.
    pub fn detach(&self) -> io::Result<()> {
        let mut attr = sys::attr();
        attr.link_detach.link_fd = raw(self.0.as_fd());
        // SAFETY: the command reads one number.
        unsafe { bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
    }

    /// Pins the link at `path`, where nothing may exist.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let mut attr = sys::attr();
        attr.__bindgen_anon_4.pathname = name.as_ptr() as u64;
        attr.__bindgen_anon_4.bpf_fd = raw(self.0.as_fd());
        // SAFETY: `name` outlives the call.
        unsafe { bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(drop)
    }
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the ids of all links of the machine, in ascending order; needs `CAP_SYS_ADMIN`.
pub fn link_ids() -> impl Iterator<Item = io::Result<u32>> {
    let mut last = Some(0);
    std::iter::from_fn(move || {
        let mut attr = sys::attr();
        attr.__bindgen_anon_6.__bindgen_anon_1.start_id = last?;
        // SAFETY: the command reads and writes numbers.
        let next =
            unsafe { bpf(bpf_cmd::BPF_LINK_GET_NEXT_ID, &mut attr).map(|_| attr.__bindgen_anon_6.next_id) };
        last = next.as_ref().ok().copied();
        Some(next).filter(|next| !matches!(next, Err(error) if error.kind() == io::ErrorKind::NotFound))
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
    let mut programs = [0u32; MAX_QUERIED];
    let mut links = [0u32; MAX_QUERIED];
    let mut attr = sys::attr();
    attr.query.__bindgen_anon_1.target_ifindex = ifindex;
    attr.query.attach_type = attach_type;
    attr.query.prog_ids = programs.as_mut_ptr() as u64;
    attr.query.link_ids = links.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.count = MAX_QUERIED as u32;
    // SAFETY: both arrays hold `count` elements and outlive the call, which writes the count.
    match unsafe { bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr).map(|_| attr.query.__bindgen_anon_2.count) } {
        Ok(count) => Ok(links.into_iter().take(count as usize).collect()),
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
    // mov32 r0, -1 (TCX_NEXT); exit. Both instructions use no register but r0, so the order of bits does not matter.
    let instructions: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    let mut attr = sys::attr();
    attr.__bindgen_anon_3.prog_type = bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS as u32;
    attr.__bindgen_anon_3.insn_cnt = instructions.len() as u32;
    attr.__bindgen_anon_3.insns = instructions.as_ptr() as u64;
    attr.__bindgen_anon_3.license = c"GPL".as_ptr() as u64;
    attr.__bindgen_anon_3.prog_name = sys::kernel_name("tc_pass_on");
    // SAFETY: instructions and license outlive the call, which returns a descriptor.
    unsafe { bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) }
}
