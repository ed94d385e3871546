//! The number of CPUs of the machine.

use std::thread::available_parallelism;

use aya::util::{nr_cpus, online_cpus};

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
        Self { online, possible: nr_cpus().map_or(online, |count| count as u32) }
    }
}

/// Returns the number of CPUs of the machine that are online, as kube-proxy counts them (`DetectNumCPU` in
/// `pkg/proxy/conntrack/sysctls.go`). If the kernel does not report it, the CPUs that this process may use, which a container
/// limits.
pub fn online() -> u32 {
    let own = || available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX));
    online_cpus().map_or_else(|_| own(), |cpus| cpus.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

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
