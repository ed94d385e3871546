//! The node's netfilter: its settings, what another proxy has left there, and how to take that away.
//!
//! nfnetlink is spoken directly: a container image of ours has neither `nft` nor `iptables`.

pub mod connections;
mod expressions;
pub mod handover;
mod legacy;
mod message;
pub mod old_proxy;
pub mod rules;
pub mod sysctl;
