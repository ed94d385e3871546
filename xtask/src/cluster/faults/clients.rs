//! Who asks whom while something goes wrong: clients on every path, with every kind of connection.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::probe::{Kind, Target};
use super::world::{self, World};
use crate::cluster::plan::Node;
use crate::exec::Cmd;

/// The deployment whose pods stay: long connections end with their pods.
pub(super) const STAY: &str = "stay";
/// The same pods behind a Service with session affinity.
const STICKY: &str = "sticky";
/// How many pods stay.
pub(super) const PODS: u8 = 4;
/// Cluster addresses of `stay`, TCP at 80 and UDP at 8081.
const STAY_V4: &str = "10.96.0.81";
const STAY_V6: &str = "fd96::81";
const STICKY_V4: &str = "10.96.0.82";
const STICKY_V6: &str = "fd96::82";
const TCP_PORT: u16 = 30081;
const UDP_PORT: u16 = 30082;
const STICKY_PORT: u16 = 30083;

/// A client: where it is, and whom it asks.
#[derive(Debug)]
pub(super) struct Client {
    /// In words.
    pub name: String,
    /// Whose `ballast explain` tells what becomes of its connections.
    pub node: Node,
    /// As `ballast explain` calls it.
    pub who: String,
    /// What runs a command there.
    pub place: Cmd,
    /// Whom it asks.
    pub targets: Vec<Target>,
}

/// The objects behind the targets, beside those of [`World`].
pub(super) fn objects() -> Vec<Value> {
    let mut items = world::served(STAY, PODS, None);
    let service = |name: &str, addresses: [&str; 2], ports: Value, affinity: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "type": "NodePort",
                "selector": { "app": STAY },
                "clusterIP": addresses[0],
                "clusterIPs": addresses,
                "ipFamilyPolicy": "RequireDualStack",
                "sessionAffinity": affinity,
                "ports": ports,
            },
        })
    };
    items.truncate(1);
    items.push(service(
        STAY,
        [STAY_V4, STAY_V6],
        json!([
            { "name": "tcp", "port": 80, "targetPort": 8080, "nodePort": TCP_PORT },
            { "name": "udp", "protocol": "UDP", "port": 8081, "targetPort": 8081, "nodePort": UDP_PORT },
        ]),
        "None",
    ));
    items.push(service(
        STICKY,
        [STICKY_V4, STICKY_V6],
        json!([{ "port": 80, "targetPort": 8080, "nodePort": STICKY_PORT }]),
        "ClientIP",
    ));
    items
}

/// The names of what [`objects`] made, as kubectl deletes them.
pub(super) const NAMES: [&str; 3] = ["deployment/stay", "service/stay", "service/sticky"];

/// All clients.
pub(super) fn all(world: &World<'_>) -> Result<Vec<Client>> {
    let place = world.place;
    let (first, last) = (Node(1), *place.nodes().last().context("a cluster without nodes")?);
    let address = world.address(world::PLAIN)?;
    Ok(vec![
        Client {
            name: format!("a process of {first}"),
            node: first,
            who: "host".into(),
            place: place.node(first).command(&[]),
            targets: inside()?,
        },
        Client {
            name: format!("a pod of {last}"),
            node: last,
            who: "pod".into(),
            place: world.in_pod()?,
            targets: inside()?,
        },
        Client {
            name: format!("another pod of {last}, past the socket programs"),
            node: last,
            who: address,
            place: world.past_sockets()?,
            targets: inside()?,
        },
        Client {
            name: format!("outside, by {first}"),
            node: first,
            who: crate::cluster::plan::CONTROL_V4.into(),
            place: place.control().command(&[]),
            targets: outside(first)?,
        },
        Client {
            name: format!("outside, by {last}"),
            node: last,
            who: crate::cluster::plan::CONTROL_V4.into(),
            place: place.control().command(&[]),
            targets: outside(last)?,
        },
    ])
}

/// Clients inside of the cluster that ask all of these.
pub(super) fn of_all(world: &World<'_>, targets: &[Target]) -> Result<Vec<Client>> {
    let clients = all(world)?.into_iter().take(3);
    Ok(clients.map(|client| Client { targets: targets.to_vec(), ..client }).collect())
}

fn inside() -> Result<Vec<Target>> {
    let v6 = |port: u16| format!("[{STAY_V6}]:{port}");
    Ok(vec![
        Target::new(Kind::New, world::ADDRESS, "echo-")?,
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
        Target::new(Kind::New, &v4(world::NODE_PORT), "echo-")?,
        Target::new(Kind::New, &v6(TCP_PORT), "stay-")?,
        Target::new(Kind::Long, &v4(TCP_PORT), "stay-")?,
        Target::new(Kind::Long, &v6(TCP_PORT), "stay-")?,
        Target::new(Kind::Udp, &v6(UDP_PORT), "stay-")?,
        Target::new(Kind::Flow, &v4(UDP_PORT), "stay-")?,
        Target::new(Kind::Sticky, &v4(STICKY_PORT), "stay-")?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_connection_is_made_inside_and_outside() {
        for targets in [inside().unwrap(), outside(Node(1)).unwrap()] {
            for kind in [Kind::New, Kind::Long, Kind::Udp, Kind::Flow, Kind::Sticky] {
                assert!(targets.iter().any(|target| target.kind == kind), "{kind:?}");
            }
            for is_v6 in [false, true] {
                assert!(targets.iter().any(|target| target.address.is_ipv6() == is_v6));
            }
        }
    }

    #[test]
    fn what_is_made_is_removed() {
        let made = objects();
        let names: Vec<_> = made
            .iter()
            .map(|object| {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                format!("{}/{}", text(&object["kind"]).to_lowercase(), text(&object["metadata"]["name"]))
            })
            .collect();
        assert_eq!(names, NAMES);
    }
}
