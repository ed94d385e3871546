//! Describes a case in words.

use std::fmt::Write as _;

use crate::case::{Sent, Step};
use crate::model::parse::parse;
use crate::scenario::Scenario;

/// Number of bytes of a packet that are shown: all headers.
const SHOWN: usize = 192;

/// Returns the bytes in hexadecimal, 16 on each line.
pub fn hex(bytes: &[u8]) -> String {
    let mut out = String::new();
    for (position, byte) in bytes.iter().take(SHOWN).enumerate() {
        let before = match position % 16 {
            0 if position == 0 => "    ",
            0 => "\n    ",
            even if even % 2 == 0 => " ",
            _ => "",
        };
        write!(out, "{before}{byte:02x}").unwrap();
    }
    if bytes.len() > SHOWN {
        write!(out, " and {} more", bytes.len() - SHOWN).unwrap();
    }
    out
}

/// Returns the case as a line of Rust that runs it again.
pub fn replay(bytes: &[u8]) -> String {
    let list: Vec<_> = bytes.iter().map(|byte| format!("{byte:#04x}")).collect();
    format!("replay(&[{}]);", list.join(", "))
}

pub fn scenario(scenario: &Scenario) -> String {
    let mut out = String::new();
    let Scenario {
        is_v6,
        masquerade_all,
        other_proxy,
        knows_pods,
        knows_range,
        unmanaged,
        snat,
        dsr,
        limits_flows,
        ..
    } = scenario;
    writeln!(
        out,
        "node: IPv{}, masquerade all: {masquerade_all}, leave old: {other_proxy}, pods' range: {knows_pods}, Services' range: {knows_range}, unmanaged: {unmanaged:?}, source: {:?} {snat:?}, DSR: {dsr:?}, few flows: {limits_flows}",
        if *is_v6 { 6 } else { 4 },
        scenario.source(),
    )
    .unwrap();
    for service in &scenario.services {
        writeln!(
            out,
            "Service {}: {:?} {} protocol {}, affinity {} s, allowed {:?}, local inside {} outside {}, stale {}, DSR {}, previous {:?}",
            service.id,
            service.kind,
            service.frontend,
            service.proto,
            service.affinity,
            service.allowed,
            service.is_local_inside,
            service.is_local_outside,
            service.is_stale,
            scenario.is_dsr(service),
            service.previous,
        )
        .unwrap();
        for endpoint in &service.endpoints {
            let (local, serves, tunnel) = (endpoint.is_local, endpoint.serves, endpoint.has_tunnel);
            writeln!(
                out,
                "  endpoint {} {}, local: {local}, serves: {serves}, tunnel: {tunnel}",
                endpoint.id, endpoint.addr
            )
            .unwrap();
        }
    }
    out
}

pub fn step(step: &Step, sent: Option<&Sent>) -> String {
    match step {
        Step::Packet(hook, context, packet) => {
            let mut out = format!("{hook:?} {context:?}\n  {:?}\n{}", parse(packet), hex(packet));
            if let Some(sent) = sent {
                let seen = &sent.seen;
                write!(out, "\n  {:?}\n", seen.outcome).unwrap();
                if seen.packet == *packet {
                    out.push_str("  unchanged");
                } else {
                    write!(out, "  {:?}\n{}", parse(&seen.packet), hex(&seen.packet)).unwrap();
                }
            }
            out
        }
        other => format!("{other:?}"),
    }
}
