//! Implementation of the traits for the kernel: maps, socket buffers, and the functions that the verifier checks
//! separately.

pub mod cast;
pub mod clock;
mod codes;
pub mod crc;
pub mod events;
pub mod fib;
mod frame;
pub mod handle;
pub mod health;
pub mod hook;
pub mod iter;
pub mod latency;
pub mod maps;
mod selection;
pub mod skb;
pub mod sock_ops;
pub mod sockaddr;
pub mod sockets;
pub mod subprograms;
pub mod tables;
pub mod xdp;
pub mod xdp_calls;
