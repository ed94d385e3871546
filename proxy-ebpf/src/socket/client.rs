//! The client of a call, by the network namespace of its socket: the node itself, a pod, or neither.

use proxy_common::config::NodeConfig;

use crate::env::{Node, Pods};

/// Whether a network namespace is the node's own.
#[inline(always)]
pub fn is_host<M: Node>(maps: M, netns: u64) -> bool {
    maps.config().is_some_and(|config| config.host_netns == netns)
}

/// Whether `namespaces` shows which namespaces are those of pods.
#[inline(always)]
fn learns(config: &NodeConfig) -> bool {
    config.pod_cgroups[0] == 0 && (config.pods4.is_some() || config.pods6.is_some())
}

/// Notes that a network namespace is a pod's, if the source of its connection shows it. The source is the one of these that
/// has the socket's family.
#[inline(always)]
pub fn learn<M: Pods>(maps: M, netns: u64, v4: [u32; 1], v6: [u32; 4]) {
    let Some(config) = maps.config() else { return };
    if !learns(config) || config.host_netns == netns {
        return;
    }
    // No range of pods contains the address of a socket of the other family: zero, or 127.0.0.6 (`LOOPBACK4_IPV6`).
    let is_in4 = config.pods4.is_some() && config.pods4.contains(&v4);
    let is_in6 = config.pods6.is_some() && config.pods6.contains(&v6);
    if (is_in4 || is_in6) && !maps.has_namespace(netns) {
        maps.add_namespace(netns);
    }
}

/// The deepest level of the cgroup tree at which the cgroups of pods are looked for.
const CGROUP_LEVELS: i32 = 8;

/// The most levels from the cgroup of all pods to that of a process of a container: a quality of service class, a pod, a
/// container, and the group that crun makes in it. Deeper are the processes of containers in a container (kind in a pod), whose
/// own cluster may have the same addresses of Services, and translates them where they leave the container.
const CONTAINER_LEVELS: i32 = 4;

/// Whether a socket of the current process is a pod's: by the cgroup of the process; where the cgroups of pods are not known, by
/// the network namespace; also true if the node's range of pods is not known either.
#[inline(always)]
pub fn is_pod<M: Pods>(maps: M, config: &NodeConfig, netns: u64) -> bool {
    let [first, second] = config.pod_cgroups;
    if first == 0 {
        return !learns(config) || maps.has_namespace(netns);
    }
    let mut level = 1;
    while level <= CGROUP_LEVELS {
        let id = maps.ancestor_cgroup(level);
        if id == 0 {
            return false;
        }
        if id == first || id == second {
            return maps.ancestor_cgroup(level + CONTAINER_LEVELS + 1) == 0;
        }
        level += 1;
    }
    false
}
