//! The node's netfilter: its settings, what another proxy has left there, and how to take that away.
//!
//! nfnetlink is spoken directly: a container image of ours has neither `nft` nor `iptables`.

pub mod connections;
pub mod export_conntrack;
mod expressions;
pub mod kube_proxy_rules;
mod legacy;
mod message;
pub mod rules;
pub mod sysctl;
