//! What the running kernel supports. The kernel itself is asked, not its version: distributions backport features to older
//! releases.

use std::collections::BTreeSet;
use std::fmt;

use aya::EbpfLoader;
use aya::maps::MapType;
use aya::programs::{ProgramType, loaded_programs};
use aya::sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported};
use serde::Serialize;

use super::bpf;

/// The oldest release on which the programs load.
pub const OLDEST: (u32, u32) = oldest(cfg!(target_arch = "aarch64"));

/// On aarch64, the JIT compiler has atomic exchanges since Linux 5.18, and tail calls beside BPF-to-BPF calls since 6.0
/// (`arch/arm64/net/bpf_jit_comp.c`).
const fn oldest(is_arm64: bool) -> (u32, u32) {
    if is_arm64 { (6, 0) } else { (5, 15) }
}

/// A feature that the kernel lacks, and that Ballast can do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingFeature {
    /// Socket programs cannot set the error of a call that they deny (`bpf_set_retval`).
    SocketErrors,
    /// XDP programs cannot copy bytes out of a frame (`bpf_xdp_load_bytes`).
    Xdp,
    /// Devices have no TCX hooks.
    Tcx,
}

impl MissingFeature {
    /// All features, the oldest first.
    pub const ALL: [Self; 3] = [Self::Xdp, Self::SocketErrors, Self::Tcx];

    /// Whether this kernel lacks the feature. If the kernel does not permit the check, the feature counts as present.
    pub fn is_missing(self) -> bool {
        let missing = |kind, helper| matches!(is_helper_supported(kind, helper), Ok(false));
        match self {
            Self::SocketErrors => missing(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval),
            Self::Xdp => missing(ProgramType::Xdp, BpfHelper::BPF_FUNC_xdp_load_bytes),
            Self::Tcx => bpf::has_tcx() == Some(false),
        }
    }
}

impl fmt::Display for MissingFeature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SocketErrors => {
                "bpf_set_retval for sockets (Linux 6.1): a call to a Service without endpoints is not refused; its packets are rejected or \
                 dropped; --socket-drop fail has no effect; with --node-port-bind refuse, bind fails with EPERM instead of EADDRINUSE"
            }
            Self::Xdp => "bpf_xdp_load_bytes (Linux 5.18): XDP is not used, only tc",
            Self::Tcx => {
                "TCX (Linux 6.6): packet programs are filters of the clsact qdisc, and --tcx-order has no effect"
            }
        })
    }
}

/// Returns the features that this kernel lacks, as far as it permits the check.
pub fn missing_features() -> Vec<MissingFeature> {
    MissingFeature::ALL.into_iter().filter(|feature| feature.is_missing()).collect()
}

/// Returns the features that this kernel lacks; `None` if it does not permit this process to check.
pub fn known_missing_features() -> Option<Vec<MissingFeature>> {
    bpf::has_tcx().map(|_| missing_features())
}

/// Sets in the programs which features the kernel lacks, and returns these features, for the operator.
pub(super) fn adapt(loader: &mut EbpfLoader<'_>) -> Vec<MissingFeature> {
    let missing = missing_features();
    if missing.contains(&MissingFeature::SocketErrors) {
        loader.override_global("SOCKET_ERRORS", &0u64, true);
    }
    missing
}

/// Returns what to add to the kernel's error if the kernel is older than [`OLDEST`]; otherwise an empty string.
pub(super) fn too_old() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    hint(release.trim()).unwrap_or_default()
}

/// Whether tasks of one CPU may interrupt each other while they process packets: since Linux 6.18, `local_bh_disable` of a
/// `PREEMPT_RT` kernel takes no lock (unless it has `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`, which a running kernel does not show).
/// The packet programs share memory per CPU.
pub fn interleaves_packets() -> bool {
    let read = |name| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    interleaves(read("osrelease").trim(), &read("version"))
}

fn interleaves(release: &str, version: &str) -> bool {
    version.contains("PREEMPT_RT") && numbers(release).is_some_and(|release| release >= (6, 18))
}

/// Returns the first two numbers of a release.
fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Whether a release is older than any on which the programs are known to load; `None` if the text is no release.
pub fn is_too_old(release: &str) -> Option<bool> {
    numbers(release).map(|release| release < OLDEST)
}

fn hint(release: &str) -> Option<String> {
    let (major, minor) = OLDEST;
    is_too_old(release)?.then(|| {
        format!(
            "Linux {release} is too old: Ballast's programs need Linux {major}.{minor} or newer; boot a newer kernel. "
        )
    })
}

/// The types of programs that Ballast cannot do without, and their names in the kernel.
pub const PROGRAMS: [(&str, ProgramType); 4] = [
    ("cgroup_sock_addr", ProgramType::CgroupSockAddr),
    ("cgroup_sock", ProgramType::CgroupSock),
    ("sock_ops", ProgramType::SockOps),
    ("sched_cls", ProgramType::SchedClassifier),
];

/// The types of maps that Ballast cannot do without, and their names in the kernel.
pub const MAPS: [(&str, MapType); 8] = [
    ("array", MapType::Array),
    ("percpu_array", MapType::PerCpuArray),
    ("hash", MapType::Hash),
    ("lru_hash", MapType::LruHash),
    ("lpm_trie", MapType::LpmTrie),
    ("prog_array", MapType::ProgramArray),
    ("ringbuf", MapType::RingBuf),
    ("sk_storage", MapType::SkStorage),
];

/// Returns those of [`PROGRAMS`] that the kernel lacks; `None` if the kernel does not let this process ask.
pub fn missing_programs() -> Option<Vec<&'static str>> {
    missing(&PROGRAMS, |kind| is_program_supported(kind).ok())
}

/// Returns those of [`MAPS`] that the kernel lacks; `None` if the kernel does not let this process ask.
pub fn missing_maps() -> Option<Vec<&'static str>> {
    missing(&MAPS, |kind| is_map_supported(kind).ok())
}

fn missing<T: Copy>(all: &[(&'static str, T)], has: impl Fn(T) -> Option<bool>) -> Option<Vec<&'static str>> {
    let mut lacking = Vec::new();
    for (name, kind) in all {
        if !has(*kind)? {
            lacking.push(*name);
        }
    }
    Some(lacking)
}

/// Returns the names of all programs in the kernel, including those of other software; the kernel keeps 15 bytes of each.
/// Empty if the kernel does not let this process ask.
pub fn loaded_names() -> BTreeSet<String> {
    loaded_programs().flatten().filter_map(|info| info.name_as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newer_kernels_with_preempt_rt_interleave_packets() {
        let rt = "#1 SMP PREEMPT_RT Debian 6.18.3-1 (2026-01-05)";
        for (release, version, expected) in [
            ("6.18.3-rt-amd64", rt, true),
            ("7.0.0-rc1", rt, true),
            ("6.17.13-rt-amd64", rt, false),
            ("6.12.57-rt-amd64", rt, false),
            ("6.18.3-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.18.3-1 (2026-01-05)", false),
        ] {
            assert_eq!(interleaves(release, version), expected, "{release} {version}");
        }
    }

    #[test]
    fn the_oldest_kernel_depends_on_the_architecture() {
        assert_eq!([oldest(false), oldest(true)], [(5, 15), (6, 0)]);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn only_older_kernels_are_called_too_old() {
        for release in ["5.10.0-46-amd64", "5.13.0-52-generic", "4.19", "5.14.0-503.el9.x86_64"] {
            let hint = hint(release).unwrap();
            assert!(hint.contains(release) && hint.contains("5.15"), "{hint}");
        }
        for release in ["5.15.0-204-generic", "6.1.0-56-amd64", "7.2.13+deb14-amd64", "10.0", "", "x.y"] {
            assert_eq!(hint(release), None, "{release}");
        }
    }

    #[test]
    fn missing_types_are_listed_and_denied_probes_are_unknown() {
        let all = [("one", 1), ("two", 2), ("three", 3)];
        assert_eq!(missing(&all, |kind| Some(kind != 2)), Some(vec!["two"]));
        assert_eq!(missing(&all, |_| Some(true)), Some(vec![]));
        assert_eq!(missing(&all, |kind| (kind != 3).then_some(true)), None);
    }
}
