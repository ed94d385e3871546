//! Ballast's figures, measured on this machine: `cargo xtask test bench`. It needs root.
//!
//! Values that are compared are measured in turn, in many short rounds, and the median counts: so other load on the machine
//! affects all sides alike. No figure fails because a machine is slow.
#![expect(clippy::unwrap_used, reason = "a benchmark that cannot measure ends by panicking")]
#![expect(clippy::print_stdout, reason = "it prints a table")]
#![expect(clippy::cast_precision_loss, reason = "no count here comes near 2^52")]

mod agent;
mod foreign;
mod growth;
mod million;
mod node_ports;
mod packets;
mod snat_forward;
mod sockets;
mod tables;
mod wire;

use std::path::{Path, PathBuf};
use std::time::Instant;

use proxy_testbed::isolate::isolate;
use proxy_testbed::report::Row;
use proxy_testbed::{kube, report};

/// Measures a part; its maps are pinned below the folder.
type Measure = fn(&Path) -> Vec<Row>;

fn main() {
    if let Some(family) = std::env::args().skip_while(|argument| argument != growth::SENDER).nth(1) {
        return growth::send_datagrams(&family);
    }
    let mut arguments = std::env::args().skip(1);
    let (mut is_bench, mut json, mut parts) = (false, None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => is_bench = true,
            "--json" => json = arguments.next().map(PathBuf::from),
            _ => parts.push(argument),
        }
    }
    // `cargo test --benches` also starts this program, but is not to measure.
    if !is_bench {
        return;
    }
    // If no part is named, measure all parts.
    let wants = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let bpffs = isolate();
    let mut rows = Vec::new();
    let mut speeds = vec![report::speed()];
    let all: [(&str, Measure); 9] = [
        ("packets", packets::measure),
        ("wire", wire::measure),
        ("flows", million::measure),
        ("foreign", foreign::measure),
        ("growth", growth::measure),
        ("sockets", sockets::measure),
        ("node-ports", |_| node_ports::measure()),
        ("tables", |_| tables::measure()),
        ("agent", agent::measure),
    ];
    for (part, measure) in all {
        // Without the programs of Kubernetes, skip `node-ports` unless it was named.
        if !wants(part) || (parts.is_empty() && part == "node-ports" && !kube::is_there()) {
            continue;
        }
        let begun = Instant::now();
        let measured = measure(&bpffs);
        speeds.push(report::speed());
        println!("{part}: {} figures in {:.0} s", measured.len(), begun.elapsed().as_secs_f64());
        rows.extend(measured);
    }
    rows.extend(report::speeds(speeds));
    report::print(&rows);
    if let Some(path) = json {
        report::write(&rows, &path);
    }
}
