//! The state of this machine: the cgroup tree, network devices and namespaces, sockets.

pub mod cgroup;
pub mod cpus;
pub mod devices;
pub mod diag;
pub mod facts;
pub mod follow;
pub mod lock;
pub mod manager;
pub mod memory;
pub mod netfilter;
pub mod netlink;
pub mod netns;
pub mod node_path;
pub mod ports;
pub mod seen;
pub mod selection;
pub mod tunnel_errors;
mod xfrm;
