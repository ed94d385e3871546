//! `cargo xtask setup`: finds or installs what the other commands need.

use anyhow::{Result, bail};

use crate::toolchain::Toolchain;
use crate::workspace::Workspace;
use crate::{apiserver, apt, exec, go, log};

/// Check and install the tools that the other commands need.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Only the tools for a build: a compiler and a linker for BPF
    #[arg(long)]
    pub build_only: bool,
    /// Also build kube-apiserver, etcd, kube-proxy and an OTLP receiver for the apiserver tests (takes minutes, once)
    #[arg(long, conflicts_with = "build_only")]
    pub api_server: bool,
}

/// What a command needs tools for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// Compile the BPF programs.
    Bpf,
    /// Run tests in network namespaces.
    Netns,
    /// Boot another kernel.
    Kernel,
    /// Boot a kernel for aarch64.
    Arm,
    /// Show the demo.
    Demo,
    /// Run a Kubernetes cluster.
    Cluster,
    /// Check scripts and units.
    Lint,
    /// Make the container image.
    Image,
    /// Draw diagrams.
    Docs,
    /// Run real clients, servers and neighbours.
    Traffic,
}

/// A program, the Debian package that contains it, and what it is needed for.
struct Tool {
    program: &'static str,
    package: &'static str,
    needs: &'static [Need],
}

const TOOLS: [Tool; 39] = [
    Tool {
        program: "ip",
        package: "iproute2",
        needs: &[Need::Netns, Need::Kernel, Need::Demo, Need::Cluster, Need::Traffic],
    },
    Tool { program: "nft", package: "nftables", needs: &[Need::Netns, Need::Cluster, Need::Traffic] },
    Tool { program: "bpftool", package: "bpftool", needs: &[Need::Netns, Need::Demo] },
    Tool { program: "ethtool", package: "ethtool", needs: &[Need::Netns] },
    Tool { program: "tmux", package: "tmux", needs: &[Need::Netns] },
    Tool { program: "chromium", package: "chromium", needs: &[Need::Netns] },
    Tool { program: "redis-server", package: "redis-server", needs: &[Need::Demo, Need::Traffic] },
    Tool { program: "redis-cli", package: "redis-tools", needs: &[Need::Demo, Need::Traffic] },
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86", needs: &[Need::Kernel] },
    Tool { program: "qemu-system-aarch64", package: "qemu-system-arm", needs: &[Need::Arm] },
    Tool { program: "cpio", package: "cpio", needs: &[Need::Kernel] },
    Tool { program: "modprobe", package: "kmod", needs: &[Need::Kernel] },
    Tool { program: "busybox", package: "busybox-static", needs: &[Need::Kernel, Need::Cluster] },
    Tool { program: "runc", package: "runc", needs: &[Need::Cluster] },
    Tool { program: "openssl", package: "openssl", needs: &[Need::Cluster, Need::Traffic] },
    Tool { program: "iptables", package: "iptables", needs: &[Need::Netns, Need::Cluster] },
    Tool { program: "conntrack", package: "conntrack", needs: &[Need::Cluster] },
    Tool { program: "ipset", package: "ipset", needs: &[Need::Cluster] },
    Tool { program: "shellcheck", package: "shellcheck", needs: &[Need::Lint] },
    Tool { program: "systemd-analyze", package: "systemd", needs: &[Need::Lint] },
    Tool { program: "dot", package: "graphviz", needs: &[Need::Docs] },
    Tool { program: "buildah", package: "buildah", needs: &[Need::Image] },
    Tool { program: "wrk", package: "wrk", needs: &[Need::Traffic] },
    Tool { program: "ab", package: "apache2-utils", needs: &[Need::Traffic] },
    Tool { program: "nginx", package: "nginx-light", needs: &[Need::Traffic] },
    Tool { program: "haproxy", package: "haproxy", needs: &[Need::Traffic] },
    Tool { program: "iperf3", package: "iperf3", needs: &[Need::Traffic] },
    Tool { program: "dnsperf", package: "dnsperf", needs: &[Need::Traffic] },
    Tool { program: "unbound", package: "unbound", needs: &[Need::Traffic] },
    Tool { program: "sipp", package: "sip-tester", needs: &[Need::Traffic] },
    Tool { program: "keepalived", package: "keepalived", needs: &[Need::Traffic] },
    Tool { program: "conntrackd", package: "conntrackd", needs: &[Need::Traffic] },
    Tool { program: "firewalld", package: "firewalld", needs: &[Need::Traffic] },
    Tool { program: "dbus-daemon", package: "dbus", needs: &[Need::Traffic] },
    Tool { program: "pip3", package: "python3-pip", needs: &[Need::Traffic] },
    // A cluster copies these four into the images of its pods.
    Tool { program: "curl", package: "curl", needs: &[Need::Cluster, Need::Demo, Need::Traffic] },
    Tool { program: "wget", package: "wget", needs: &[Need::Cluster] },
    Tool { program: "dig", package: "bind9-dnsutils", needs: &[Need::Cluster, Need::Traffic] },
    Tool { program: "nc.openbsd", package: "netcat-openbsd", needs: &[Need::Cluster] },
];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    log::line(Toolchain::setup()?.describe());
    if args.build_only {
        return Ok(());
    }
    for need in [Need::Netns, Need::Kernel, Need::Demo, Need::Lint] {
        tools(need)?;
    }
    log::line("tools of the tests and the demo: all there");
    match go::find_or_install() {
        Ok(go) => log::line(format_args!("Go, for the apiserver tests: {}", go.display())),
        Err(error) => log::line(format_args!("no Go, the apiserver tests will be skipped: {error:#}")),
    }
    if args.api_server {
        let made = apiserver::build(&Workspace::find()?)?;
        for (_, path) in made.environment() {
            log::line(format_args!("built: {}", path.display()));
        }
    }
    Ok(())
}

/// Installs the programs that `need` requires, and returns the BPF toolchain.
pub fn toolchain(need: Need) -> Result<Toolchain> {
    tools(need)?;
    let toolchain = Toolchain::setup()?;
    log::line(toolchain.describe());
    Ok(toolchain)
}

/// Installs the missing programs that `need` requires.
pub fn tools(need: Need) -> Result<()> {
    let missing = missing(need, |program| exec::which(program).is_some());
    if missing.is_empty() {
        return Ok(());
    }
    if !apt::exists() {
        bail!("missing: {} (Debian's package names); please install them", missing.join(" "));
    }
    apt::install(&missing)
}

fn missing(need: Need, is_there: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let needed = TOOLS.iter().filter(|tool| tool.needs.contains(&need));
    needed.filter(|tool| !is_there(tool.program)).map(|tool| tool.package).collect()
}
