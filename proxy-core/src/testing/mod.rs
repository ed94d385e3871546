//! For tests, also of other crates: valid clusters and plans, and what the tables lead to.
#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    clippy::panic,
    reason = "these are parts of tests"
)]

pub mod arbitrary;
pub mod generator;
pub mod oracle;

use std::net::{Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a port that is free in both families. Below the ephemeral ports: other tests take those at the same time.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = std::process::id() * 64 + u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (number % 20_000) as u16;
        if TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}
