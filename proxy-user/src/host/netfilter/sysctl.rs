//! Sets sysctls of the node's netfilter, as kube-proxy does, with its defaults. Netfilter tracks the connections that it masquerades
//! for Ballast, and others that pass the node.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::host::cpus;
use proxy_core::model::settings::Conntrack;

/// The upper limit of the number of connections by `max_per_core`, as in kube-proxy.
const MOST: u64 = 1 << 20;
/// The largest number of connections.
const MAX: &str = "nf_conntrack_max";

/// A sysctl could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {value} to {path}: {source}", path = path.display())]
pub struct SysctlError {
    /// The file.
    pub path: PathBuf,
    /// The value that was to be written.
    pub value: u64,
    /// The cause.
    pub source: io::Error,
}

/// Returns the largest number of connections on a machine with `cores`; `None` if it is not set.
fn max(wanted: &Conntrack, cores: u32) -> Option<u64> {
    let scaled = u64::from(wanted.max_per_core?) * u64::from(cores);
    let least = u64::from(wanted.min.unwrap_or_default());
    Some(if scaled > MOST { MOST } else { scaled.max(least) })
}

/// Returns names and values of the files below `/proc/sys/net/netfilter`.
fn sysctls(wanted: &Conntrack, cores: u32) -> Vec<(&'static str, u64)> {
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs());
    [
        (MAX, max(wanted, cores)),
        ("nf_conntrack_tcp_timeout_established", seconds(wanted.tcp_established)),
        ("nf_conntrack_tcp_timeout_close_wait", seconds(wanted.tcp_close_wait)),
        ("nf_conntrack_tcp_be_liberal", wanted.tcp_be_liberal.then_some(1)),
        ("nf_conntrack_udp_timeout", seconds(wanted.udp)),
        ("nf_conntrack_udp_timeout_stream", seconds(wanted.udp_stream)),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}

/// Writes the requested values that differ, a limit of connections only if it is higher, and a hash size of a quarter of the connections; returns what failed.
/// `proc_sys` and `modules` are `/proc/sys` and `/sys/module`.
pub fn apply(wanted: &Conntrack, proc_sys: &Path, modules: &Path) -> Vec<SysctlError> {
    let cores = cpus::online();
    let mut failed = Vec::new();
    for (name, value) in sysctls(wanted, cores) {
        // kube-proxy only raises the limit: a node with more connections would refuse new ones.
        let is_enough = |is| if name == MAX { is >= value } else { is == value };
        failed.extend(write(proc_sys.join("net/netfilter").join(name), value, is_enough).err());
    }
    if let Some(max) = max(wanted, cores) {
        let path = modules.join("nf_conntrack/parameters/hashsize");
        failed.extend(write(path, max / 4, |is| is >= max / 4).err());
    }
    failed
}

fn write(path: PathBuf, value: u64, is_enough: impl Fn(u64) -> bool) -> Result<(), SysctlError> {
    let is = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
    if is.is_some_and(is_enough) {
        return Ok(());
    }
    match fs::write(&path, value.to_string()) {
        Ok(()) => {
            tracing::info!(file = %path.display(), value, "netfilter sysctl set");
            Ok(())
        }
        Err(source) => Err(SysctlError { path, value, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(None, Some(5), 4, None)]
    #[case(Some(100), None, 4, Some(400))]
    #[case(Some(100), Some(500), 4, Some(500))]
    #[case(Some(1 << 20), Some(1 << 30), 4, Some(1 << 20))]
    fn the_largest_number_is_kube_proxys(
        #[case] max_per_core: Option<u32>,
        #[case] min: Option<u32>,
        #[case] cores: u32,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(max(&Conntrack { max_per_core, min, ..Conntrack::default() }, cores), expected);
    }

    #[test]
    fn unrequested_sysctls_and_a_higher_limit_stay_and_failed_ones_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (sys, modules) = (dir.path().join("sys"), dir.path().join("module"));
        fs::create_dir_all(sys.join("net/netfilter")).unwrap();
        fs::create_dir_all(modules.join("nf_conntrack/parameters")).unwrap();
        let file = |name: &str| sys.join("net/netfilter").join(name);
        fs::write(file("nf_conntrack_tcp_timeout_close_wait"), "60\n").unwrap();
        fs::write(file("nf_conntrack_max"), "1\n").unwrap();
        fs::write(file("nf_conntrack_udp_timeout"), "30\n").unwrap();
        fs::write(modules.join("nf_conntrack/parameters/hashsize"), "16\n").unwrap();
        let read = |name: &str| fs::read_to_string(file(name)).unwrap();

        assert!(apply(&Conntrack::default(), &sys, &modules).is_empty());
        assert_eq!(read("nf_conntrack_max"), "1\n");
        let wanted = Conntrack {
            max_per_core: Some(1),
            min: Some(4096),
            tcp_close_wait: Some(Duration::from_hours(1)),
            ..Conntrack::default()
        };
        assert!(apply(&wanted, &sys, &modules).is_empty());
        assert_eq!(
            (&*read("nf_conntrack_max"), &*read("nf_conntrack_tcp_timeout_close_wait")),
            ("4096", "3600")
        );
        assert_eq!(read("nf_conntrack_udp_timeout"), "30\n");
        assert_eq!(fs::read_to_string(modules.join("nf_conntrack/parameters/hashsize")).unwrap(), "1024");

        fs::write(file(MAX), "262144\n").unwrap();
        assert!(apply(&wanted, &sys, &modules).is_empty());
        assert_eq!(read(MAX), "262144\n", "it is never lowered");

        let nowhere = apply(&wanted, &dir.path().join("none"), &modules);
        assert_eq!(nowhere.len(), 2, "{nowhere:?}");
        assert!(nowhere[0].to_string().contains("nf_conntrack_max"), "{}", nowhere[0]);
    }
}
