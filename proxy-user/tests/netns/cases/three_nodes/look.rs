//! Observes each cell of the table, and writes the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;

use super::rule::{Location, Mode, PLACES, POLICIES, Who, expected, node_port};
use crate::nodes::node_ip;
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;

/// Returns what the client sees in so many connections; for an error, its text is in the server's place.
pub fn observe(peer: &Peer, attempt: Attempt, attempts: usize) -> Result<BTreeSet<(String, Option<IpAddr>)>> {
    let mut all = BTreeSet::new();
    for _ in 0..attempts {
        let seen = match peer.once(attempt)? {
            Ok(seen) => seen,
            // A `connect` that the peer itself gives up has no error number.
            Err(failure) if matches!(failure.errno, None | Some(libc::EAGAIN | libc::ETIMEDOUT)) => break,
            Err(failure) => {
                all.insert((failure.text, None));
                break;
            }
        };
        let answers = if attempt.kind.is_tcp() { seen.peer } else { seen.from };
        let is_right = answers == Some(attempt.to);
        let server = if is_right { seen.server } else { format!("{} from {answers:?}", seen.server) };
        all.insert((server, Some(seen.client.ip())));
    }
    Ok(all)
}

/// An observed cell: client, policy, place; protocol, family, what was seen and expected; and whether this is right.
pub struct Cell {
    pub at: (Who, usize, Location),
    pub what: String,
    pub seen: String,
    pub is_right: bool,
}

/// Returns all cells of one client.
pub fn cells(mode: Mode, who: Who, peer: &Peer) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for policy in 0..POLICIES.len() {
        for location in PLACES {
            if matches!(location, Location::Itself(other) if other != who) {
                continue;
            }
            for family in Family::BOTH {
                for kind in [SocketKind::Tcp, SocketKind::Datagram] {
                    let to: SocketAddr = (who.orig_dst(family), node_port(policy, location, kind)).into();
                    let expected: BTreeSet<_> = expected(mode, who, policy, location, family)
                        .into_iter()
                        .map(|(server, ip)| (server, Some(ip)))
                        .collect();
                    let patience = if expected.is_empty() { 1 } else { 5 };
                    let attempts = if location == Location::Both { 20 } else { 2 };
                    let attempt = Attempt { patience, ..Attempt::new(kind, to) };
                    let seen = observe(peer, attempt, attempts)?;
                    let is_right = seen == expected;
                    let protocol = if kind.is_tcp() { "TCP" } else { "UDP" };
                    let what = format!("{protocol}, {family:?}: {seen:?}, not {expected:?}");
                    cells.push(Cell { at: (who, policy, location), what, seen: words(&seen, who), is_right });
                }
            }
        }
    }
    Ok(cells)
}

/// Returns an observation in the table's words.
pub fn words(seen: &BTreeSet<(String, Option<IpAddr>)>, who: Who) -> String {
    let of = |(server, ip): &(String, Option<IpAddr>)| {
        let is = |wanted: fn(Family, u8) -> IpAddr, number| {
            Family::BOTH.map(|f| wanted(f, number)).map(Some).contains(ip)
        };
        let source = match ip {
            None => return format!("error ({server})"),
            _ if who == Who::HostProcess => "its own",
            _ if Family::BOTH.map(|family| Some(who.ip(family))).contains(ip) => "the client's",
            _ if is(node_ip, 1) => "the node's",
            Some(_) => "another",
        };
        let stray = if server.contains(" from ") { ", answered by the endpoint" } else { "" };
        format!("{source}{stray}")
    };
    let all: BTreeSet<String> = seen.iter().map(of).collect();
    let all: Vec<_> = all.into_iter().collect();
    match (all.is_empty(), seen.len()) {
        (true, _) => "dropped".to_owned(),
        (false, 2..) => format!("{} endpoints: {}", seen.len(), all.join(", ")),
        _ => all.join(", "),
    }
}

/// Returns the table as markdown: a row for each client, a column for each policy and place.
pub fn table(mode: Mode, cells: &[Cell]) -> String {
    let places =
        [Location::Near, Location::Far, Location::Both, Location::Node, Location::Itself(Who::LocalPod)];
    let mut text = format!("\n{mode:?}: which address the endpoint sees\n\n| client |");
    let mut line = "|---|".to_owned();
    for policy in POLICIES {
        for location in places {
            let _ = write!(text, " {policy}: {} |", location.label());
            line.push_str("---|");
        }
    }
    let _ = write!(text, "\n{line}\n");
    for who in Who::ALL {
        let _ = write!(text, "| {} |", who.label());
        for policy in 0..POLICIES.len() {
            for location in places {
                let here = cells.iter().filter(|cell| {
                    let (of, in_policy, at) = cell.at;
                    of == who && in_policy == policy && at.label() == location.label()
                });
                let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
                here.for_each(|cell| *seen.entry(&cell.seen).or_default() += 1);
                let seen: Vec<_> = seen.into_keys().collect();
                let _ =
                    write!(text, " {} |", if seen.is_empty() { "-".to_owned() } else { seen.join(" / ") });
            }
        }
        text.push('\n');
    }
    text
}
