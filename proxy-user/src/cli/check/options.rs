//! Checks the options that a kernel was built with.

use std::fs;
use std::io::Read as _;

use flate2::read::GzDecoder;

/// Options that Ballast needs. `NET_CLS_BPF` and `NET_SCH_INGRESS` are needed only by kernels without TCX; they are small, and
/// kernels usually have them.
pub const NEEDED: [&str; 6] =
    ["BPF_SYSCALL", "CGROUP_BPF", "NET_CLS_ACT", "NET_SCH_INGRESS", "NET_CLS_BPF", "INET"];

/// Returns the options of [`NEEDED`] that the running kernel lacks; `None` if the list of its options cannot be read.
pub fn missing(release: &str) -> Option<Vec<&'static str>> {
    Some(missing_in(&read(release)?))
}

fn read(release: &str) -> Option<String> {
    if let Ok(file) = fs::File::open("/proc/config.gz") {
        let mut text = String::new();
        if GzDecoder::new(file).read_to_string(&mut text).is_ok() {
            return Some(text);
        }
    }
    let folders = [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
        format!("/usr/lib/modules/{release}/config"),
    ];
    folders.iter().find_map(|path| fs::read_to_string(path).ok())
}

fn missing_in(text: &str) -> Vec<&'static str> {
    let has = |option: &str| {
        text.lines().any(|line| {
            let rest = line.strip_prefix("CONFIG_").and_then(|rest| rest.strip_prefix(option));
            matches!(rest, Some("=y" | "=m"))
        })
    };
    NEEDED.into_iter().filter(|option| !has(option)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_and_modules_count() {
        let all = NEEDED.map(|option| format!("CONFIG_{option}=m\n")).concat();
        assert_eq!(missing_in(&all), Vec::<&str>::new());
        let some = all.replace("CONFIG_CGROUP_BPF=m", "# CONFIG_CGROUP_BPF is not set");
        assert_eq!(missing_in(&some), ["CGROUP_BPF"]);
        assert_eq!(missing_in("CONFIG_INET_ESP=y\n"), NEEDED, "a longer name is another option");
    }
}
