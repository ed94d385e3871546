//! The capabilities that the process needs.

use std::io;
use std::path::Path;

use rustix::thread::CapabilitySet;

use super::error::Error;
use super::forbidden::forbidden;

/// Fails if the process lacks a capability for loading and attaching, or if bpf(2) is forbidden.
pub fn require() -> Result<(), Error> {
    match missing().map_err(Error::file("read capabilities in", Path::new("/proc")))?.as_slice() {
        [] => forbidden().map_or(Ok(()), |why| Err(Error::Forbidden(why))),
        missing => Err(Error::Capabilities(missing.join(", "))),
    }
}

/// Returns the capabilities that this process lacks for loading and attaching.
pub fn missing() -> io::Result<Vec<&'static str>> {
    Ok(missing_capabilities(rustix::thread::capabilities(None)?.effective))
}

fn missing_capabilities(effective: CapabilitySet) -> Vec<&'static str> {
    // CAP_SYS_ADMIN includes the first two, as it did before they were split off.
    let admin = effective.contains(CapabilitySet::SYS_ADMIN);
    [
        ("CAP_BPF", admin || effective.contains(CapabilitySet::BPF)),
        ("CAP_PERFMON", admin || effective.contains(CapabilitySet::PERFMON)),
        ("CAP_NET_ADMIN", effective.contains(CapabilitySet::NET_ADMIN)),
    ]
    .into_iter()
    .filter_map(|(name, has)| (!has).then_some(name))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_capabilities_are_named() {
        let all = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::NET_ADMIN;
        assert!(missing_capabilities(all).is_empty());
        assert!(missing_capabilities(CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN).is_empty());
        assert_eq!(missing_capabilities(CapabilitySet::BPF), ["CAP_PERFMON", "CAP_NET_ADMIN"]);
    }
}
