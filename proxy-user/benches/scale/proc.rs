//! Statistics of the kernel about a process and a device.

use std::fs;
use std::time::Duration;

/// Returns the CPU time that a process has used.
pub fn cpu(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The process name may contain any character, and ends at the last bracket.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_secs_f64(ticks as f64 / per_second as f64)
}

/// Returns a size in MB from `/proc/PID/status`: `VmRSS`, `RssAnon`, `VmHWM`.
pub fn memory(process: u32, name: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kilobytes: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes / 1024.0
}

/// Returns the number of bytes that a device of this thread's network namespace has sent.
pub fn sent(device: &str) -> u64 {
    let all = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = all.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':')).unwrap();
    line.split_whitespace().nth(8).unwrap().parse().unwrap()
}
