//! Names and addresses of a cluster: the same in every cluster, because each has its own network.

use std::fmt::{self, Write as _};

use anyhow::{Result, bail};

/// Maximum number of nodes: the number of a node is the last digit of its address.
pub const MOST_NODES: u8 = 9;
/// Name of the machine with the API server and the other programs beside the nodes; for the nodes it is outside the cluster.
pub const CONTROL: &str = "control";
/// Address of a second API server on the same machine.
pub const SECOND_V4: &str = "172.30.0.2";
/// Address at which nodes reach both API servers, if a Service for it exists.
pub const CONTROL_VIP: &str = "172.30.200.1";
/// The address of the machine `control`, in the nodes' network.
pub const CONTROL_V4: &str = "172.30.0.1";
/// The same in IPv6.
pub const CONTROL_V6: &str = "fd30::1";
/// Address ranges of all pods.
pub const POD_RANGES: &str = "10.244.0.0/16,fd44::/48";
/// Address ranges of all Services.
pub const SERVICE_RANGES: &str = "10.96.0.0/16,fd96::/108";
/// The address of the Service `kubernetes`: the first of the range.
pub const API_SERVICE: &str = "10.96.0.1";
/// The address of the cluster's DNS.
pub const DNS_SERVICE: &str = "10.96.0.10";
/// How many zones the nodes are spread over.
const ZONES: u8 = 3;

/// A node of a cluster, identified by its number, from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node(pub u8);

impl Node {
    /// The first `count` nodes.
    pub fn first(count: u8) -> impl Iterator<Item = Self> + Clone {
        (1..=count.min(MOST_NODES)).map(Self)
    }

    /// Its address in the nodes' network.
    pub fn v4(self) -> String {
        format!("172.30.0.1{}", self.0)
    }

    /// The same in IPv6.
    pub fn v6(self) -> String {
        format!("fd30::1{}", self.0)
    }

    /// Address range of its pods.
    pub fn pods_v4(self) -> String {
        format!("10.244.{}.0/24", self.0)
    }

    /// The same in IPv6.
    pub fn pods_v6(self) -> String {
        format!("fd44:0:0:{}::/64", self.0)
    }

    /// Its zone.
    pub fn zone(self) -> String {
        format!("zone{}", (self.0 - 1) % ZONES + 1)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node{}", self.0)
    }
}

/// Returns ip(8) commands for the machine `control`: a bridge that connects all nodes, and the routes to the pods. Each
/// node comes with the PID of a process in its netns.
pub fn control_lines(nodes: &[(Node, u32)]) -> String {
    let mut lines = format!(
        "link set lo up\nlink add nodes type bridge\naddress add {CONTROL_V4}/24 dev nodes\n\
         address add {SECOND_V4}/24 dev nodes\naddress add {CONTROL_V6}/64 dev nodes nodad\nlink set nodes up\n"
    );
    for (node, process) in nodes {
        let _ = write!(
            lines,
            "link add {node} type veth peer name eth0 netns {process}\nlink set {node} master nodes up\n\
             route add {} via {}\nroute add {} via {}\n",
            node.pods_v4(),
            node.v4(),
            node.pods_v6(),
            node.v6()
        );
    }
    lines
}

/// Returns ip(8) commands for a node; its `eth0` exists already.
pub fn node_lines(node: Node) -> String {
    format!(
        "link set lo up\naddress add {}/24 dev eth0\naddress add {}/64 dev eth0 nodad\nlink set eth0 up\n\
         route add default via {CONTROL_V4}\nroute add default via {CONTROL_V6}\n",
        node.v4(),
        node.v6()
    )
}

/// Returns ip(8) commands that route the pods of other nodes to their node.
pub fn route_lines(node: Node, nodes: &[Node]) -> String {
    let mut lines = String::new();
    for other in nodes.iter().filter(|other| **other != node) {
        let _ = write!(
            lines,
            "route add {} via {}\nroute add {} via {}\n",
            other.pods_v4(),
            other.v4(),
            other.pods_v6(),
            other.v6()
        );
    }
    lines
}

/// Runs `work` for all nodes at the same time.
pub(super) fn each(nodes: &[Node], work: impl Fn(Node) -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = nodes
            .iter()
            .map(|&node| {
                scope.spawn({
                    let work = &work;
                    move || work(node)
                })
            })
            .collect();
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ended.into_iter().try_for_each(|result| match result {
            Ok(done) => done,
            Err(_) => bail!("a thread died"),
        })
    })
}
