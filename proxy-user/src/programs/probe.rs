//! Which types of programs and maps the running kernel supports, and whose programs it runs. For `ballast check`.

use std::collections::BTreeSet;

use aya::maps::MapType;
use aya::programs::{ProgramType, loaded_programs};
use aya::sys::{is_map_supported, is_program_supported};

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
    fn missing_types_are_listed_and_denied_probes_are_unknown() {
        let all = [("one", 1), ("two", 2), ("three", 3)];
        assert_eq!(missing(&all, |kind| Some(kind != 2)), Some(vec!["two"]));
        assert_eq!(missing(&all, |_| Some(true)), Some(vec![]));
        assert_eq!(missing(&all, |kind| (kind != 3).then_some(true)), None);
    }
}
