//! A cluster address that the node itself has, as with `NodeLocal` `DNSCache`: clients that dial it reach the node's process.

use anyhow::{Result, ensure};

use super::{Case, WEB, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind, Peer};

const WISH: Wish = Wish { pods: 2, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] =
    &[Case { name: "own::an_address_of_the_node_is_left_alone_while_it_has_it", wish: WISH, run: cache }];

fn cache(fixture: &Fixture) -> Result<()> {
    let pod = fixture.pod(1)?;
    let clients: [(&str, &Peer); 3] =
        [("node", &fixture.local), ("outside", &fixture.client), ("pod", &*pod)];
    let answers = |server: &str| {
        for family in Family::BOTH {
            for (who, client) in clients {
                for kind in [Kind::Tcp, Kind::Udp] {
                    eventually(SOON, || {
                        let seen = client.reach(Attempt::new(kind, vip(family, WEB, kind)))?;
                        ensure!(seen.server.starts_with(server), "{who}, {kind:?}: {} answers", seen.server);
                        Ok(())
                    })?;
                }
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    answers("0/")?;
    let own = Family::BOTH.map(|family| vip(family, WEB, Kind::Tcp).ip());
    let change = |what: &str, nodad: &str| {
        let [v4, v6] = own;
        fixture.node.ip(&format!("addr {what} {v4}/32 dev lo\naddr {what} {v6}/128 dev lo{nodad}\n"))
    };
    change("add", " nodad")?;
    for family in Family::BOTH {
        for kind in [Kind::Tcp, Kind::Udp] {
            fixture.outside.serve(kind.is_tcp(), vip(family, WEB, kind), "cache")?;
        }
    }
    answers("cache")?;
    let list = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
    let shown: Vec<_> = list["unmanaged"].as_array().into_iter().flatten().collect();
    ensure!(shown.len() == 2 && shown.iter().all(|one| one["reason"] == "own-address"), "{list}");
    fixture.agent_mut()?.says(&["unmanaged address", "default/web"])?;
    ensure!(!fixture.log().contains("WARN"), "that is no problem");
    change("del", "")?;
    answers("0/")
}
