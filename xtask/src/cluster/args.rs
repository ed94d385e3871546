//! The command line of `cargo xtask cluster`.

use std::path::PathBuf;

use super::{Given, Proxy, faults, plan};

/// Make, look at, and end real Kubernetes clusters on this machine (as root).
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(subcommand)]
    pub(super) command: Action,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub(super) enum Action {
    /// Make a cluster: control plane, nodes, DNS, and what serves its Services
    Up(Up),
    /// End a cluster and remove all of it
    Down(Which),
    /// Say what runs, and how to reach it
    Status(Which),
    /// Take another proxy
    Proxy {
        /// The one to take
        #[arg(value_enum)]
        proxy: Proxy,
        #[command(flatten)]
        given: Given,
        #[command(flatten)]
        which: Which,
    },
    /// Give all nodes the images of an archive
    Load {
        /// An archive in Docker's or OCI's layout
        archive: PathBuf,
        #[command(flatten)]
        which: Which,
    },
    /// Run a command on a machine of the cluster
    Exec {
        /// `control` (kubectl works there), or a node: node1
        #[arg(long, default_value = plan::CONTROL)]
        on: String,
        #[command(flatten)]
        which: Which,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Bring faults upon a cluster while clients make connections, and show what they saw
    Faults {
        #[command(flatten)]
        args: faults::Args,
        #[command(flatten)]
        which: Which,
    },
    /// What comes to the hooks of a node's programs in `faults`
    #[command(hide = true)]
    Foreign {
        /// The hook
        hook: String,
    },
    /// Bring faults upon a cluster in random order, and compare where connections end with what `ballast explain` predicts
    Chaos {
        #[command(flatten)]
        args: faults::ChaosArgs,
        #[command(flatten)]
        which: Which,
    },
    /// Replace pods that have no probes, under one proxy after the other, and count the connections that fail
    Rolling {
        #[command(flatten)]
        args: faults::RollingArgs,
        #[command(flatten)]
        which: Which,
    },
    /// Make a cluster of two nodes by kubeadm, without kube-proxy, and see that Ballast serves it
    Kubeadm {
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
    /// The cluster's name: several may run side by side
    #[arg(long, default_value = "main")]
    pub name: String,
}

/// A cluster that is wanted.
#[derive(clap::Args, Clone, Debug)]
pub struct Up {
    /// How many nodes, 1 to 9; zones alternate between three
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=i64::from(plan::MOST_NODES)))]
    pub nodes: u8,
    /// What serves the Services
    #[arg(long, value_enum, default_value_t = Proxy::BallastHost)]
    pub proxy: Proxy,
    /// A setting of Ballast's agents, as `VARIABLE=VALUE`; may be given several times
    #[arg(long = "setting", value_name = "VARIABLE=VALUE")]
    pub settings: Vec<String>,
    /// Which Ballast.
    #[command(flatten)]
    pub given: Given,
    /// Which cluster.
    #[command(flatten)]
    pub which: Which,
}
