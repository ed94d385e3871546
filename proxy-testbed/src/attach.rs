//! A separate node for each test: a network namespace, a cgroup and a bpffs.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use aya_obj::generated::bpf_cmd;
use proxy_user::maps::sys::{attr, bpf_fd, kernel_name};
use proxy_user::programs::bpf::{Hook, Link, LinkInfo, link_ids, tcx_links};
use proxy_user::programs::{
    Capacities, ClsactPriority, EMBEDDED, PacketHook, Programs, Settings, TcxOrder, Xdp,
};

/// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
pub const TCX: [u32; 2] = [46, 47];

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The bpffs and the cgroup of a test. Dropping the value removes them, also after a panic.
pub struct Node {
    pub bpffs: PathBuf,
    pub cgroup: PathBuf,
}

/// Runs a test on its own thread, in its own network namespace.
pub fn on_node(test: impl FnOnce(&Node) + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: only this thread changes its network namespace, and it shares no descriptors by number.
            let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
            run("ip link set lo up");
            test(&Node::new());
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

impl Node {
    fn new() -> Self {
        let name =
            format!("ballast-attach-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let root = proxy_user::host::cgroup::find(None).unwrap();
        assert!(root.whole, "the tests need the root of the cgroup2 hierarchy");
        let node = Self { bpffs: std::env::temp_dir().join(&name), cgroup: root.path.join(&name) };
        fs::create_dir(&node.cgroup).unwrap();
        fs::create_dir(&node.bpffs).unwrap();
        node
    }

    pub fn settings(&self) -> Settings {
        let capacities = Capacities {
            services: 64,
            frontends: 64,
            slots: 256,
            maglev_words: 1024,
            backends: 128,
            flows: 256,
            sockets: 128,
            refusals: 32,
            source_ranges: 64,
            connect_latency: false,
            by_memory: 1,
        };
        Settings {
            object: EMBEDDED,
            bpffs: self.bpffs.clone(),
            cgroup: self.cgroup.clone(),
            capacities,
            packet_hook: PacketHook::Auto,
            tcx_order: TcxOrder::default(),
            clsact_priority: ClsactPriority::default(),
            xdp: Xdp::default(),
        }
    }

    pub fn start(&self) -> Programs {
        Programs::start(&self.settings()).unwrap()
    }

    /// Starts an agent that attaches all programs, packet programs to this device.
    pub fn serve(&self, device: u32) -> Programs {
        let agent = self.start();
        agent.attach_sockets().unwrap();
        agent.attach_device(device, false).unwrap();
        agent
    }

    pub fn start_with(&self, packet_hook: PacketHook) -> Programs {
        Programs::start(&Settings { packet_hook, ..self.settings() }).unwrap()
    }

    pub fn ballast(&self) -> PathBuf {
        self.bpffs.join("ballast")
    }

    /// Returns the kernel's information about a pinned link.
    pub fn link(&self, pin: &str) -> LinkInfo {
        Link::pinned(&self.ballast().join("links").join(pin)).unwrap().unwrap().info().unwrap()
    }

    /// Returns all links on the cgroup, including foreign ones.
    pub fn links_on_cgroup(&self) -> Vec<LinkInfo> {
        links_on(&self.cgroup)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A test may mount one file system over another.
        while rustix::mount::unmount(&self.bpffs, rustix::mount::UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir(&self.bpffs);
        // A failed test may leave a child cgroup, which has to be removed before its parent.
        for entry in fs::read_dir(&self.cgroup).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(entry.path());
        }
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Reduced capabilities of this thread; dropping the value restores the previous ones.
pub struct Privileges(CapabilitySets);

impl Privileges {
    pub fn reduce(effective: CapabilitySet) -> Self {
        let all = capabilities(None).unwrap();
        set_capabilities(None, CapabilitySets { effective, ..all }).unwrap();
        Self(all)
    }
}

impl Drop for Privileges {
    fn drop(&mut self) {
        // After a panic, the node is removed, which needs all capabilities.
        let _ = set_capabilities(None, self.0);
    }
}

/// Returns all links on a cgroup, including foreign ones.
pub fn links_on(cgroup: &Path) -> Vec<LinkInfo> {
    let wanted = cgroup.metadata().unwrap().ino();
    link_ids()
        .filter_map(|id| Link::by_id(id.unwrap()).ok()?.info().ok())
        .filter(|info| matches!(info.hook, Hook::Cgroup { id, .. } if id == wanted))
        .collect()
}

/// Returns the ids of the links on both TCX hooks of a device.
pub fn links_on_device(ifindex: u32) -> Vec<u32> {
    TCX.iter().flat_map(|hook| tcx_links(ifindex, *hook).unwrap()).collect()
}

/// Runs a shell command in the network namespace of this thread; returns what it printed.
pub fn run(line: &str) -> String {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Creates a veth pair of `name` and `<name>p`, and returns the ifindex of the first.
pub fn veth(name: &str) -> u32 {
    run(&format!("ip link add {name} type veth peer name {name}p"));
    index(name).unwrap()
}

/// Returns the ifindex of a device, or `None` if it does not exist.
pub fn index(name: &str) -> Option<u32> {
    let devices = proxy_user::host::devices::list().unwrap();
    devices.iter().find(|device| device.name == name).map(|device| device.ifindex)
}

/// Loads a foreign program, which always returns 1: at a cgroup hook, it allows every call.
pub fn foreign(program_type: u32, attach_type: u32) -> OwnedFd {
    // mov64 r0, 1; exit. For a classifier, 1 is TC_ACT_RECLASSIFY; no packet arrives where the tests attach it.
    let instructions: [u64; 2] = [0x1_0000_00b7, 0x95];
    let mut attr = attr();
    attr.__bindgen_anon_3.prog_type = program_type;
    attr.__bindgen_anon_3.insn_cnt = 2;
    attr.__bindgen_anon_3.insns = instructions.as_ptr() as u64;
    attr.__bindgen_anon_3.license = c"GPL".as_ptr() as u64;
    attr.__bindgen_anon_3.prog_name = kernel_name("foreign_program");
    attr.__bindgen_anon_3.expected_attach_type = attach_type;
    // SAFETY: instructions and license outlive the call, which returns a descriptor.
    unsafe { bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) }.unwrap()
}
