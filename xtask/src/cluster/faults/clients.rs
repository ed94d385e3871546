//! Clients that run during a fault: on every path, with every kind of connection.

use anyhow::{Context as _, Result};

use super::load::{Client, Tally};
use super::objects::{STAY_V4, STAY_V6, STICKY_PORT, STICKY_V4, TCP_PORT, UDP_PORT};
use super::probe::{Kind, Target};
use super::testbed::{self, Testbed};
use crate::cluster::plan::Node;

/// Runs clients on every path during `work`.
pub(super) fn under_traffic<T>(testbed: &Testbed<'_>, work: impl FnOnce() -> T) -> Result<(Tally, T)> {
    Testbed::run_clients_during(all(testbed)?, work)
}

/// Returns all clients.
pub(super) fn all(testbed: &Testbed<'_>) -> Result<Vec<Client>> {
    let workdir = testbed.workdir;
    let (first, last) = (Node(1), *workdir.nodes().last().context("a cluster without nodes")?);
    let address = testbed.address(testbed::PLAIN)?;
    Ok(vec![
        Client {
            name: format!("a process of {first}"),
            node: first,
            who: "host".into(),
            workdir: workdir.node(first).command(&[]),
            targets: inside()?,
        },
        Client {
            name: format!("a pod of {last}"),
            node: last,
            who: "pod".into(),
            workdir: testbed.in_pod()?,
            targets: inside()?,
        },
        Client {
            name: format!("another pod of {last}, past the socket programs"),
            node: last,
            who: address,
            workdir: testbed.past_sockets()?,
            targets: inside()?,
        },
        Client {
            name: format!("outside, by {first}"),
            node: first,
            who: crate::cluster::plan::CONTROL_V4.into(),
            workdir: workdir.control().command(&[]),
            targets: outside(first)?,
        },
        Client {
            name: format!("outside, by {last}"),
            node: last,
            who: crate::cluster::plan::CONTROL_V4.into(),
            workdir: workdir.control().command(&[]),
            targets: outside(last)?,
        },
    ])
}

/// Returns the clients inside the cluster, each with all of these targets.
pub(super) fn of_all(testbed: &Testbed<'_>, targets: &[Target]) -> Result<Vec<Client>> {
    let clients = all(testbed)?.into_iter().take(3);
    Ok(clients.map(|client| Client { targets: targets.to_vec(), ..client }).collect())
}

fn inside() -> Result<Vec<Target>> {
    let v6 = |port: u16| format!("[{STAY_V6}]:{port}");
    Ok(vec![
        Target::new(Kind::New, testbed::ADDRESS, "echo-")?,
        Target::new(Kind::New, &v6(80), "stay-")?,
        Target::new(Kind::Long, &format!("{STAY_V4}:80"), "stay-")?,
        Target::new(Kind::Long, &v6(80), "stay-")?,
        Target::new(Kind::Udp, &format!("{STAY_V4}:8081"), "stay-")?,
        Target::new(Kind::Flow, &v6(8081), "stay-")?,
        Target::new(Kind::Sticky, &format!("{STICKY_V4}:80"), "stay-")?,
    ])
}

fn outside(node: Node) -> Result<Vec<Target>> {
    let v4 = |port: u16| format!("{}:{port}", node.v4());
    let v6 = |port: u16| format!("[{}]:{port}", node.v6());
    Ok(vec![
        Target::new(Kind::New, &v4(testbed::NODE_PORT), "echo-")?,
        Target::new(Kind::New, &v6(TCP_PORT), "stay-")?,
        Target::new(Kind::Long, &v4(TCP_PORT), "stay-")?,
        Target::new(Kind::Long, &v6(TCP_PORT), "stay-")?,
        Target::new(Kind::Udp, &v6(UDP_PORT), "stay-")?,
        Target::new(Kind::Flow, &v4(UDP_PORT), "stay-")?,
        Target::new(Kind::Sticky, &v4(STICKY_PORT), "stay-")?,
    ])
}
