//! The stages of the packet path. Each stage is a function from a packet and its context to a [`Step`](crate::step::Step);
//! [`pipeline`](crate::pipeline) calls them in the order given by the steps.

pub mod classify;
pub mod direct;
pub mod echo;
pub mod eject;
pub mod established;
pub mod existing;
pub mod forward;
pub mod fragment;
pub mod icmp;
pub mod limit;
pub mod martian;
pub mod new_flow;
pub mod open_flow;
pub mod receive;
pub mod refuse;
pub mod reset;
pub mod sctp;
pub mod seen;
pub mod source;
pub mod translate;
pub mod tunnel;
