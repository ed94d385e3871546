//! Checks the kernel.

use super::CheckLine;
use crate::cli::check::facts::Kernel;
use crate::programs::{MissingFeature, OLDEST, is_too_old};

/// Marks the release of a kernel with backported BPF: Red Hat Enterprise Linux and the distributions built from it.
const BACKPORT_MARK: &str = ".el";

pub(super) fn judge(kernel: &Kernel) -> Vec<CheckLine> {
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

fn version(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-version";
    let (release, (major, minor)) = (&kernel.release, OLDEST);
    let oldest = format!("the programs need Linux {major}.{minor} or newer");
    match is_too_old(release) {
        Some(false) => CheckLine::pass(CHECK, format!("Linux {release}")),
        Some(true) if release.contains(BACKPORT_MARK) => CheckLine::warn(
            CHECK,
            format!("Linux {release}; {oldest}, but this distribution backports BPF of newer kernels"),
            "try it on one node: if the kernel rejects the programs, the agent exits with the verifier's log",
        ),
        Some(true) => CheckLine::fail(CHECK, format!("Linux {release}; {oldest}"), "boot a newer kernel"),
        None => CheckLine::warn(
            CHECK,
            format!("cannot parse the kernel release {release:?}; {oldest}"),
            "compare it with `uname -r` on the node",
        ),
    }
}

fn types(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-bpf";
    let (Some(programs), Some(maps)) = (&kernel.missing_programs, &kernel.missing_maps) else {
        return CheckLine::warn(
            CHECK,
            "this process may not query the kernel for its program and map types",
            "run as root, with CAP_BPF or CAP_SYS_ADMIN",
        );
    };
    let missing: Vec<_> = programs.iter().chain(maps).copied().collect();
    if missing.is_empty() {
        return CheckLine::pass(CHECK, "the kernel supports all needed program and map types");
    }
    CheckLine::fail(
        CHECK,
        format!("the kernel does not support {}", missing.join(", ")),
        "boot a kernel with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET_CLS_BPF",
    )
}

fn options(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-options";
    match &kernel.missing_options {
        None => CheckLine::pass(
            CHECK,
            "the kernel's configuration file was not found; the kernel was probed instead",
        ),
        Some(missing) if missing.is_empty() => CheckLine::pass(CHECK, "all needed options are set"),
        Some(missing) => {
            let missing: Vec<_> = missing.iter().map(|option| format!("CONFIG_{option}")).collect();
            CheckLine::fail(
                CHECK,
                format!("the kernel was built without {}", missing.join(", ")),
                "boot a kernel with these options",
            )
        }
    }
}

fn preemption(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-preemption";
    if !kernel.interleaves_packets {
        return CheckLine::pass(CHECK, "a CPU processes one packet at a time");
    }
    CheckLine::fail(
        CHECK,
        "PREEMPT_RT since Linux 6.18: tasks of one CPU interrupt each other while they process packets",
        "boot a kernel without PREEMPT_RT, or one built with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y, and give --allow-preempt-rt",
    )
}

fn features(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-features";
    let Some(missing) = &kernel.missing_features else {
        return CheckLine::warn(
            CHECK,
            "cannot tell: this process may not query the kernel for its features",
            "run as root, with CAP_BPF and CAP_NET_ADMIN",
        );
    };
    if missing.is_empty() {
        return CheckLine::pass(CHECK, "TCX, XDP with bpf_xdp_load_bytes, bpf_set_retval for sockets");
    }
    let missing: Vec<_> = missing.iter().map(MissingFeature::to_string).collect();
    CheckLine::warn(
        CHECK,
        format!("not available: {}", missing.join("; ")),
        "nothing to do; a newer kernel adds it",
    )
}

fn btf(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "kernel-btf";
    if kernel.has_btf {
        return CheckLine::pass(CHECK, "the kernel has BTF");
    }
    CheckLine::warn(
        CHECK,
        "/sys/kernel/btf/vmlinux does not exist: connected UDP sockets are not closed when their endpoint is removed",
        "boot a kernel with CONFIG_DEBUG_INFO_BTF, or mount the host's /sys into the container",
    )
}

fn jit(kernel: &Kernel) -> CheckLine {
    const CHECK: &str = "bpf-jit";
    match (kernel.jit, kernel.jit_harden) {
        (Some(0), _) => CheckLine::fail(
            CHECK,
            "net.core.bpf_jit_enable is 0: the kernel does not load programs with tail calls and BPF-to-BPF calls",
            "`sysctl -w net.core.bpf_jit_enable=1`, and set it in /etc/sysctl.d",
        ),
        (_, Some(2)) => CheckLine::warn(
            CHECK,
            "net.core.bpf_jit_harden is 2: the kernel blinds constants also in programs of root, which makes them slower",
            "`sysctl -w net.core.bpf_jit_harden=1`, unless a policy requires 2",
        ),
        (None, _) => CheckLine::pass(CHECK, "the kernel always compiles programs (JIT)"),
        _ => CheckLine::pass(CHECK, "programs are compiled (JIT)"),
    }
}
