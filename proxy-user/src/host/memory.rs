//! The amount of memory of the machine.

use std::fs;

const PATH: &str = "/proc/meminfo";

/// Returns the bytes of memory of the whole machine; `None` if the kernel does not report them.
pub fn total() -> Option<u64> {
    parse(&fs::read_to_string(PATH).ok()?)
}

fn parse(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_in_kilobytes() {
        assert_eq!(parse("MemTotal:       24683700 kB\nMemFree: 1 kB\n"), Some(24_683_700 * 1024));
        for text in ["", "MemFree: 1 kB", "MemTotal: x kB", "MemTotal: 5 MB"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert!(total().is_some_and(|bytes| bytes > 1 << 20), "this machine's");
    }
}
