//! The number of CPUs of the machine.

use std::fs;
use std::thread::available_parallelism;

const FOLDER: &str = "/sys/devices/system/cpu";

/// The CPUs of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Cpus {
    /// Those that are [`online`].
    pub online: u32,
    /// Those that the kernel is prepared for: per-CPU maps have memory for each of them.
    pub possible: u32,
}

impl Cpus {
    /// Counts the CPUs of this machine.
    pub fn of_machine() -> Self {
        let online = online();
        Self { online, possible: count("possible").unwrap_or(online) }
    }
}

/// Returns the number of CPUs of the machine that are online, as kube-proxy counts them (`DetectNumCPU` in
/// `pkg/proxy/conntrack/sysctls.go`). If the kernel does not report it, the CPUs that this process may use, which a container
/// limits.
pub fn online() -> u32 {
    let own = || available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX));
    count("online").unwrap_or_else(own)
}

fn count(list: &str) -> Option<u32> {
    parse(&fs::read_to_string(format!("{FOLDER}/{list}")).ok()?)
}

/// Returns the number of CPUs of the kernel's list, like `0-3,8-11`.
fn parse(text: &str) -> Option<u32> {
    let mut count = 0_u32;
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0\n", Some(1))]
    #[case("0-3\n", Some(4))]
    #[case("0-1,4-7\n", Some(6))]
    #[case("0-15", Some(16))]
    #[case("0,2,4-5\n", Some(4))]
    #[case("nope\n", None)]
    #[case("", None)]
    #[case("3-0\n", None)]
    #[case("0-4294967295", None)]
    fn a_list_of_cpus_is_counted(#[case] text: &str, #[case] expected: Option<u32>) {
        assert_eq!(parse(text), expected);
    }

    #[test]
    fn a_process_on_one_cpu_still_counts_those_of_the_machine() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

        let before = online();
        let counted = std::thread::spawn(move || {
            let allowed = sched_getaffinity(None).unwrap();
            let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).unwrap();
            (online(), available_parallelism().unwrap().get())
        });
        assert_eq!(counted.join().unwrap(), (before, 1));
    }
}
