//! Ballast's figures, measured on this machine: `cargo xtask bench`. It needs root.
//!
//! What is compared is measured in turn, in many short rounds, and the median counts: other load on the machine
//! then hits all sides alike. Nothing here fails because a machine is slow.
#![expect(clippy::unwrap_used, reason = "a benchmark that cannot measure ends by panicking")]
#![expect(clippy::print_stdout, reason = "it prints a table")]
#![expect(clippy::cast_precision_loss, reason = "no count here comes near 2^52")]

mod agent;
mod foreign;
#[path = "../../tests/bpf/harness.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod harness;
#[path = "../../tests/isolate/mod.rs"]
mod isolate;
#[path = "../../tests/kube/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod kube;
mod million;
#[path = "../../tests/bpf/node.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod node;
mod node_ports;
mod one_cpu;
#[path = "../../tests/bpf/packet.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod packet;
mod packets;
mod report;
mod sockets;
#[path = "../../tests/netns/space.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod space;
mod tables;
mod wire;

use std::path::PathBuf;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (mut is_bench, mut json, mut parts) = (false, None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => is_bench = true,
            "--json" => json = arguments.next().map(PathBuf::from),
            _ => parts.push(argument),
        }
    }
    // `cargo test --benches` starts this too, and means no measurement.
    if !is_bench {
        return;
    }
    let wants = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let bpffs = isolate::isolate();
    let mut rows = Vec::new();
    if wants("packets") {
        rows.extend(packets::measure(&bpffs));
    }
    if wants("wire") {
        rows.extend(wire::measure(&bpffs));
    }
    if wants("flows") {
        rows.extend(million::measure(&bpffs));
    }
    if wants("foreign") {
        rows.extend(foreign::measure(&bpffs));
    }
    if wants("sockets") {
        rows.extend(sockets::measure(&bpffs));
    }
    // Who names no parts wants what can be measured.
    if parts.iter().any(|part| part == "node-ports") || (parts.is_empty() && kube::is_there()) {
        rows.extend(node_ports::measure());
    }
    if wants("tables") {
        rows.extend(tables::measure());
    }
    if wants("agent") {
        rows.extend(agent::measure(&bpffs));
    }
    report::print(&rows);
    if let Some(path) = json {
        report::write(&rows, &path);
    }
}
