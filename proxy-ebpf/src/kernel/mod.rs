//! Implementation of the traits for the kernel: maps, socket buffers, and the functions that the verifier checks
//! separately.

pub mod calls;
pub mod cast;
pub mod clock;
pub mod crc;
pub mod events;
pub mod fib;
mod frame;
pub mod handle;
pub mod health;
pub mod hook;
pub mod iter;
pub mod latency;
pub mod lookup;
pub mod maps;
pub mod skb;
pub mod sock_ops;
pub mod sockaddr;
pub mod sockets;
pub mod tables;
pub mod xdp;
