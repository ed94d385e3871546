//! DSR with XDP in native mode at both ends: the first node encapsulates packets, and the endpoint's node removes the outer header,
//! before tc sees them.

use anyhow::{Context as _, Result, ensure};

use super::objects::{Wish, text};
use super::{answers, lead, orig_dst};
use crate::cases::xdp;
use crate::manifest::Family;
use crate::nodes::{Node, Nodes};
use crate::peer::{Attempt, SocketKind};
use crate::raw::Tap;

/// Number of exchanges of each kind.
const EXCHANGES: usize = 40;

pub fn both_ends() -> Result<()> {
    let (mut nodes, _ends) = xdp::wired()?;
    nodes.folder.put_text("all", &text(&Wish::default()))?;
    lead(&nodes, 1)?;
    let flags = ["--tenant-annotations", "all", "--xdp", "native"].map(str::to_owned);
    let begun = nodes.begin(&flags).and_then(|()| by_xdp(&nodes));
    begun.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

fn by_xdp(nodes: &Nodes) -> Result<()> {
    for node in &nodes.all {
        node.says(&["XDP program attached", "\"eth0\"", "native"])?;
    }
    answers(nodes, &Family::BOTH)?;
    let [first, second, third] = &nodes.all[..] else { anyhow::bail!("three nodes") };
    let [first, second, third] =
        [Tap::new(&first.space, "eth0")?, Tap::new(&second.space, "eth0")?, Tap::new(&third.space, "eth0")?];
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let [_, to] = orig_dst(family, kind);
            for tap in [&first, &second, &third] {
                tap.count(to.port());
            }
            for round in 0..EXCHANGES {
                let seen = nodes.outside.reach(Attempt::new(kind, to))?;
                let answers = if kind.is_tcp() { seen.peer } else { seen.from };
                ensure!(answers == Some(to), "{round}: answered by {answers:?}");
            }
            // A few packets are left to tc, to probe the next hop.
            let left = first.count(to.port());
            ensure!(left < EXCHANGES / 2, "{family:?} {kind:?}: {left} packets were not encapsulated by XDP");
            // A tap shows the port only without the outer header.
            let inner = second.count(to.port()) + third.count(to.port());
            ensure!(inner >= EXCHANGES, "{family:?} {kind:?}: {inner} packets were taken out by XDP");
        }
    }
    Ok(())
}
