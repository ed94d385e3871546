//! `--dsr-source-ranges`: nodes with the same ranges accept each other's packets, and others do not.

use anyhow::{Context as _, Result, ensure};

use super::objects::{Wish, text};
use super::{answers, lead, orig_dst};
use crate::fixture::{SOON, eventually};
use crate::nodes::{Node, Nodes};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

const FLAGS: [&str; 4] = ["--tenant-annotations", "all", "--dsr-source-ranges", "10.250.0.0/16,fd50:1::/64"];

pub fn sources() -> Result<()> {
    let mut nodes = Nodes::without_vlan()?;
    nodes.folder.put_text("all", &text(&Wish::default()))?;
    lead(&nodes, 1)?;
    let begun = nodes.begin(&FLAGS.map(str::to_owned)).and_then(|()| accepted(&mut nodes));
    begun.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

fn accepted(nodes: &mut Nodes) -> Result<()> {
    answers(nodes, &Family::BOTH)?;
    // Node 1 sends from its range, which the others do not have any more.
    for node in &mut nodes.all[1..] {
        node.restart(&FLAGS[..2])?;
    }
    let [to, _] = orig_dst(Family::V4, SocketKind::Datagram);
    eventually(SOON, || {
        let answer = nodes.outside.reach(Attempt::new(SocketKind::Datagram, to));
        ensure!(answer.is_err(), "still answered");
        let counted = |node: &Node| {
            let reasons = node.ask(&["status"])?["reasons"].clone();
            Ok(reasons["foreign_tunnel"]["count"].as_u64().unwrap_or(0))
        };
        let counts = nodes.all[1..].iter().map(counted).collect::<Result<Vec<_>>>()?;
        ensure!(counts.iter().sum::<u64>() > 0, "{counts:?}");
        Ok(())
    })
}
