//! The command line of `cargo xtask test cluster`.

use std::path::PathBuf;

use super::{Cni, Given, Proxy, faults, plan};

/// Create, inspect and delete real Kubernetes clusters on this machine (needs root).
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(subcommand)]
    pub(super) command: Action,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub(super) enum Action {
    /// Create a cluster: control plane, nodes, DNS and a proxy for Services
    Up(Up),
    /// Stop a cluster and delete it
    Down(Which),
    /// Show what is running, and how to reach it
    Status(Which),
    /// Change the proxy
    Proxy {
        /// The new proxy
        #[arg(value_enum)]
        proxy: Proxy,
        #[command(flatten)]
        given: Given,
        #[command(flatten)]
        which: Which,
    },
    /// Import the images of an archive on all nodes
    Load {
        /// An archive in Docker or OCI layout
        archive: PathBuf,
        #[command(flatten)]
        which: Which,
    },
    /// Run a command on a machine of the cluster
    Exec {
        /// `control` (has kubectl), or a node like node1
        #[arg(long, default_value = plan::CONTROL)]
        on: String,
        #[command(flatten)]
        which: Which,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Inject faults into a cluster while clients make connections, and show how many connections failed
    Faults {
        #[command(flatten)]
        args: faults::Args,
        #[command(flatten)]
        which: Which,
    },
    /// Inject faults into a cluster in random order, and compare the endpoints of connections with those that `ballast explain` predicts
    Chaos {
        #[command(flatten)]
        args: faults::RandomArgs,
        #[command(flatten)]
        which: Which,
    },
    /// Inject faults into a cluster in random order under one continuous load, count every request, and draw the resources of
    /// each agent
    Soak {
        #[command(flatten)]
        args: faults::RandomArgs,
        #[command(flatten)]
        which: Which,
    },
    /// Replace pods without probes, with one proxy after the other, and count failed connections
    Rolling {
        #[command(flatten)]
        args: faults::RollingArgs,
        #[command(flatten)]
        which: Which,
    },
    /// Create a cluster of two nodes with kubeadm, without kube-proxy, and check that Ballast works on it
    Kubeadm {
        /// Instead, create it with kube-proxy, and run the commands of docs/migration.md, to Ballast and back, while clients use
        /// its Services
        #[arg(long)]
        migrate: bool,
        #[command(flatten)]
        given: Given,
        #[command(flatten)]
        which: Which,
    },
    /// What clients of `faults` run
    #[command(hide = true)]
    Knock {
        /// Whom to ask, in turn
        #[arg(required = true)]
        targets: Vec<faults::Target>,
    },
    /// What a machine's first process runs
    #[command(hide = true)]
    Init {
        machine: String,
        #[command(flatten)]
        which: Which,
    },
}

/// Which cluster.
#[derive(clap::Args, Clone, Debug)]
pub struct Which {
    /// The cluster's name; several clusters can run at the same time
    #[arg(long, default_value = "main")]
    pub name: String,
}

/// A cluster that is wanted.
#[derive(clap::Args, Clone, Debug)]
pub struct Up {
    /// Number of nodes, 1 to 9; they are spread over three zones
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=i64::from(plan::MOST_NODES)))]
    pub nodes: u8,
    /// The proxy for Services
    #[arg(long, value_enum, default_value_t = Proxy::BallastHost)]
    pub proxy: Proxy,
    /// The CNI plugin
    #[arg(long, value_enum, default_value_t = Cni::Bridge)]
    pub cni: Cni,
    /// A setting of Ballast's agents, as `VARIABLE=VALUE`; can be given several times
    #[arg(long = "setting", value_name = "VARIABLE=VALUE")]
    pub settings: Vec<String>,
    /// Which Ballast.
    #[command(flatten)]
    pub given: Given,
    /// Which cluster.
    #[command(flatten)]
    pub which: Which,
}
