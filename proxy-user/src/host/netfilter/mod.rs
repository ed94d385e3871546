//! The node's netfilter: its sysctls, what another proxy has left there, and how to remove that.
//!
//! nfnetlink is used directly, because Ballast's container image has neither `nft` nor `iptables`.

pub mod connections;
pub mod export_conntrack;
mod expressions;
pub mod firewall;
pub mod kube_proxy_rules;
mod legacy;
pub mod lock;
pub mod masquerade;
pub(super) mod message;
pub mod rules;
pub mod sysctl;
