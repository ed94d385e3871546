//! Measurements that stay on one CPU.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// As long as this exists, its thread, the threads that it starts, and the softirqs of their packets stay on the CPU where
/// it was created. Between two CPUs, the cost of a wakeup of the other CPU hides the cost of a packet, and differs by a
/// factor of ten from one connection to the next on virtual machines.
pub struct OneCpu(CpuSet);

impl OneCpu {
    /// Pins this thread.
    pub fn pin() -> Self {
        let before = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one).unwrap();
        Self(before)
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        sched_setaffinity(None, &self.0).unwrap();
    }
}
