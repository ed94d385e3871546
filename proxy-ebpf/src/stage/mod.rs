//! The stages of the packet path, in the order in which a packet meets them. Each is a function from the packet and its
//! context to a [`Step`](crate::step::Step); [`pipeline`](crate::pipeline) decides which one is next.

pub mod classify;
pub mod direct;
pub mod eject;
pub mod established;
pub mod existing;
pub mod forward;
pub mod fragment;
pub mod icmp;
pub mod martian;
pub mod new_flow;
pub mod open_flow;
pub mod refuse;
pub mod reset;
pub mod sctp;
pub mod translate;
pub mod tunnel;
