//! Checks the kernel.

use super::Line;
use crate::cli::check::facts::Kernel;
use crate::programs::{MissingFeature, OLDEST, is_too_old};

/// Marks the release of a kernel with backported BPF: Red Hat Enterprise Linux and the distributions built from it.
const BACKPORT_MARK: &str = ".el";

pub(super) fn judge(kernel: &Kernel) -> Vec<Line> {
    vec![
        version(kernel),
        types(kernel),
        options(kernel),
        preemption(kernel),
        features(kernel),
        btf(kernel),
        jit(kernel),
    ]
}

fn version(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-version";
    let (release, (major, minor)) = (&kernel.release, OLDEST);
    let oldest = format!("the programs need Linux {major}.{minor} or newer");
    match is_too_old(release) {
        Some(false) => Line::pass(CHECK, format!("Linux {release}")),
        Some(true) if release.contains(BACKPORT_MARK) => Line::warn(
            CHECK,
            format!("Linux {release}; {oldest}, but this distribution backports BPF of newer kernels"),
            "try it on one node: if the kernel rejects the programs, the agent exits with the verifier's log",
        ),
        Some(true) => Line::fail(CHECK, format!("Linux {release}; {oldest}"), "boot a newer kernel"),
        None => Line::warn(
            CHECK,
            format!("cannot parse the kernel release {release:?}; {oldest}"),
            "compare it with `uname -r` on the node",
        ),
    }
}

fn types(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-bpf";
    let (Some(programs), Some(maps)) = (&kernel.missing_programs, &kernel.missing_maps) else {
        return Line::warn(
            CHECK,
            "this process may not query the kernel for its program and map types",
            "run as root, with CAP_BPF or CAP_SYS_ADMIN",
        );
    };
    let missing: Vec<_> = programs.iter().chain(maps).copied().collect();
    if missing.is_empty() {
        return Line::pass(CHECK, "the kernel supports all needed program and map types");
    }
    Line::fail(
        CHECK,
        format!("the kernel does not support {}", missing.join(", ")),
        "boot a kernel with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET_CLS_BPF",
    )
}

fn options(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-options";
    match &kernel.missing_options {
        None => {
            Line::pass(CHECK, "the kernel's configuration file was not found; the kernel was probed instead")
        }
        Some(missing) if missing.is_empty() => Line::pass(CHECK, "all needed options are set"),
        Some(missing) => {
            let missing: Vec<_> = missing.iter().map(|option| format!("CONFIG_{option}")).collect();
            Line::fail(
                CHECK,
                format!("the kernel was built without {}", missing.join(", ")),
                "boot a kernel with these options",
            )
        }
    }
}

fn preemption(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-preemption";
    if !kernel.interleaves_packets {
        return Line::pass(CHECK, "a CPU processes one packet at a time");
    }
    Line::fail(
        CHECK,
        "PREEMPT_RT since Linux 6.18: tasks of one CPU interrupt each other while they process packets",
        "boot a kernel without PREEMPT_RT, or one built with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y, and give --allow-preempt-rt",
    )
}

fn features(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-features";
    let Some(missing) = &kernel.missing_features else {
        return Line::warn(
            CHECK,
            "cannot tell: this process may not query the kernel for its features",
            "run as root, with CAP_BPF and CAP_NET_ADMIN",
        );
    };
    if missing.is_empty() {
        return Line::pass(CHECK, "TCX, XDP with bpf_xdp_load_bytes, bpf_set_retval for sockets");
    }
    let missing: Vec<_> = missing.iter().map(MissingFeature::to_string).collect();
    Line::warn(
        CHECK,
        format!("not available: {}", missing.join("; ")),
        "nothing to do; a newer kernel adds it",
    )
}

fn btf(kernel: &Kernel) -> Line {
    const CHECK: &str = "kernel-btf";
    if kernel.has_btf {
        return Line::pass(CHECK, "the kernel has BTF");
    }
    Line::warn(
        CHECK,
        "/sys/kernel/btf/vmlinux does not exist: connected UDP sockets are not closed when their endpoint is removed",
        "boot a kernel with CONFIG_DEBUG_INFO_BTF, or mount the host's /sys into the container",
    )
}

fn jit(kernel: &Kernel) -> Line {
    const CHECK: &str = "bpf-jit";
    match (kernel.jit, kernel.jit_harden) {
        (Some(0), _) => Line::warn(
            CHECK,
            "net.core.bpf_jit_enable is 0: programs are interpreted, which is several times slower",
            "`sysctl -w net.core.bpf_jit_enable=1`, and set it in /etc/sysctl.d",
        ),
        (_, Some(2)) => Line::warn(
            CHECK,
            "net.core.bpf_jit_harden is 2: the kernel blinds constants also in programs of root, which makes them slower",
            "`sysctl -w net.core.bpf_jit_harden=1`, unless a policy requires 2",
        ),
        (None, _) => Line::pass(CHECK, "the kernel always compiles programs (JIT)"),
        _ => Line::pass(CHECK, "programs are compiled (JIT)"),
    }
}
