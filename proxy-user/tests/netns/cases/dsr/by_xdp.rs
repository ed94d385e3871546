//! DSR with XDP in native mode at both ends: the first node encapsulates packets, and the endpoint's node removes the outer header,
//! before tc sees them.

use anyhow::{Context as _, Result, ensure};

use super::objects::{Wish, text};
use super::{answers, lead, orig_dst};
use crate::cases::xdp;
use crate::nodes::{Node, Nodes};
use crate::peer::{Attempt, SocketKind};
use crate::raw::Tap;
use proxy_testbed::Family;

/// Number of exchanges of each kind.
const EXCHANGES: usize = 40;

/// `addresses`: the families of the nodes' addresses.
pub fn both_ends(addresses: &'static [Family]) -> Result<()> {
    let (mut nodes, _ends) = xdp::wired()?;
    nodes.folder.put_text("all", &text(&Wish { nodes: addresses, ..Wish::default() }))?;
    lead(&nodes, 1)?;
    let flags = ["--tenant-annotations", "all", "--xdp", "native"].map(str::to_owned);
    let begun = nodes.begin(&flags).and_then(|()| by_xdp(&nodes, addresses));
    begun.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

fn by_xdp(nodes: &Nodes, addresses: &[Family]) -> Result<()> {
    for node in &nodes.all {
        node.says(&["XDP program attached", "\"eth0\"", "native"])?;
    }
    answers(nodes, addresses)?;
    let taps: Vec<_> = nodes.all.iter().map(|node| Tap::new(&node.space, "eth0")).collect::<Result<_>>()?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let [own, node_port] = orig_dst(family, kind);
            let to = if addresses.contains(&family) { node_port } else { own };
            for tap in &taps {
                tap.count(to.port());
            }
            for round in 0..EXCHANGES {
                let seen = nodes.outside.reach(Attempt::new(kind, to))?;
                let answers = if kind.is_tcp() { seen.peer } else { seen.from };
                ensure!(answers == Some(to), "{round}: answered by {answers:?}");
            }
            // A few packets are left to tc, to probe the next hop. A tap shows a port only without an outer header.
            let counts: Vec<_> = taps.iter().map(|tap| tap.count(to.port())).collect();
            let [left, inner @ ..] = &counts[..] else { anyhow::bail!("no nodes") };
            ensure!(
                *left < EXCHANGES / 2,
                "{family:?} {kind:?}: {left} packets were not encapsulated by XDP"
            );
            let inner: usize = inner.iter().sum();
            ensure!(inner >= EXCHANGES, "{family:?} {kind:?}: {inner} packets were taken out by XDP");
        }
    }
    Ok(())
}
