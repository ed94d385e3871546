//! `process_*`: the metrics that every Prometheus client library has of its process.

use std::fmt;
use std::fs;

use prometheus_client::encoding::DescriptorEncoder;

use super::sample::{counter, gauge};

/// Writes what `/proc/self` says.
pub(super) fn encode(e: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Some(stat) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(parse) else {
        return Ok(());
    };
    let ticks = float(rustix::param::clock_ticks_per_second());
    let seconds = |jiffies: u64| float(jiffies) / ticks;
    let page = rustix::param::page_size() as u64;
    counter(e, "process_cpu_seconds", "CPU time used", [(Vec::new(), seconds(stat.user + stat.system))])?;
    let boot = fs::read_to_string("/proc/stat").ok().as_deref().and_then(boot_time);
    let files = fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    for (name, help, value) in [
        ("process_resident_memory_bytes", "Memory in use", Some(float(stat.resident_pages * page))),
        ("process_virtual_memory_bytes", "Address space in use", Some(float(stat.virtual_bytes))),
        (
            "process_start_time_seconds",
            "Start time in seconds since 1970",
            boot.map(|boot| float(boot) + seconds(stat.start)),
        ),
        ("process_open_fds", "Open file descriptors", files.map(|count| float(count as u64))),
        ("process_max_fds", "Maximum number of open file descriptors", most.map(float)),
    ] {
        if let Some(value) = value {
            gauge(e, name, help, [(Vec::new(), value)])?;
        }
    }
    Ok(())
}

/// Returns the resident memory of this process in bytes.
pub(super) fn resident() -> Option<u64> {
    let stat = parse(&fs::read_to_string("/proc/self/stat").ok()?)?;
    Some(stat.resident_pages * rustix::param::page_size() as u64)
}

/// The used fields of `/proc/self/stat`, in its units.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    user: u64,
    system: u64,
    start: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

/// Parses fields 14, 15, 22, 23 and 24 of `proc_pid_stat(5)`. Field 2, the name, may contain spaces and brackets.
fn parse(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The first field after the name is number 3.
    let field = |number: usize| fields.get(number - 3)?.parse().ok();
    Some(Stat {
        user: field(14)?,
        system: field(15)?,
        start: field(22)?,
        virtual_bytes: field(23)?,
        resident_pages: field(24)?,
    })
}

/// Returns when the machine started, in seconds since 1970.
fn boot_time(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus has no other numbers")]
fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_is_skipped() {
        let line = "17 (a) b) S 1 2 3 4 5 6 7 8 9 10 111 222 0 0 20 0 4 0 555 666 777 888 0";
        let expected = Stat { user: 111, system: 222, start: 555, virtual_bytes: 666, resident_pages: 777 };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse("17 (x) S 1"), None);
    }

    #[test]
    fn the_machine_started_some_time() {
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\nprocesses 5\n"), Some(1_700_000_000));
        assert_eq!(boot_time("cpu 1 2\n"), None);
    }
}
