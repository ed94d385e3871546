//! A cluster address that the node itself has, as with `NodeLocal` `DNSCache`: clients that connect to it reach the node's
//! process.

use anyhow::{Result, ensure};

use super::{Case, WEB, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 2, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "own::address_of_the_node_is_unmanaged_while_a_device_has_it", wish: WISH, run: cache },
    Case { name: "own::device_of_another_proxy_leaves_services_served", wish: WISH, run: leftover },
];

fn cache(fixture: &Fixture) -> Result<()> {
    let pod = fixture.pod(1)?;
    let clients: [(&str, &Peer); 3] =
        [("node", &fixture.local), ("outside", &fixture.client), ("pod", &*pod)];
    let answers = |server: &str| {
        for family in Family::BOTH {
            for (who, client) in clients {
                for kind in [SocketKind::Tcp, SocketKind::Udp] {
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
    let own = Family::BOTH.map(|family| vip(family, WEB, SocketKind::Tcp).ip());
    let change = |what: &str, nodad: &str| {
        let [v4, v6] = own;
        fixture.node.ip(&format!("addr {what} {v4}/32 dev lo\naddr {what} {v6}/128 dev lo{nodad}\n"))
    };
    change("add", " nodad")?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
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

/// kube-router has left its device, which holds the addresses of a Service.
fn leftover(fixture: &Fixture) -> Result<()> {
    let [v4, v6] = Family::BOTH.map(|family| vip(family, WEB, SocketKind::Tcp).ip());
    fixture.node.ip(&format!(
        "link add kube-dummy-if type veth peer name other\nlink set kube-dummy-if up\nlink set other up\n\
         addr add {v4}/32 dev kube-dummy-if\naddr add {v6}/128 dev kube-dummy-if nodad\n"
    ))?;
    eventually(SOON, || {
        let shown = agent::command(&fixture.node, &["status"], &fixture.bpffs())?;
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        ensure!(shown.contains("device kube-dummy-if: another service proxy has left"), "{shown}");
        ensure!(!shown.contains("unmanaged"), "{shown}");
        Ok(())
    })?;
    let pod = fixture.pod(1)?;
    for client in [&fixture.local, &fixture.client, &*pod] {
        for family in Family::BOTH {
            for kind in SocketKind::ALL {
                let seen = client.reach(Attempt::new(kind, vip(family, WEB, kind)))?;
                ensure!(seen.server.starts_with("0/"), "{kind:?}: {} answers", seen.server);
            }
        }
    }
    Ok(())
}
