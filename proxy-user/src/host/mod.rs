//! What is on this machine: the cgroup tree and the network devices.

pub mod cgroup;
pub mod devices;
pub mod facts;
pub mod manager;
pub mod netlink;
pub mod selection;
