//! What the flags about the network add up to.

use std::net::IpAddr;

use proxy_common::config::SNAT_PORTS;

use crate::model::settings::{DetectLocal, NodePortAddresses, NodeSettings};

use super::args::network::{DetectLocalMode, NetworkArgs};
use super::config::ConfigError;
use super::value::NodePortAddress;

/// The settings of the node, from the flags; `address` is what --bind-address says.
pub fn node_settings(args: &NetworkArgs, address: IpAddr) -> Result<NodeSettings, ConfigError> {
    if let Some(both) = args.uplinks.iter().find(|pattern| args.local_devices.contains(pattern)) {
        return Err(ConfigError::BothSides(both.clone()));
    }
    Ok(NodeSettings {
        address: Some(address).filter(|address| !address.is_unspecified()),
        node_port_addresses: node_port_addresses(&args.nodeport_addresses),
        detect_local: detect_local(args)?,
        masquerade_all: args.masquerade_all.unwrap_or_default(),
        snat_ports: args.snat_ports.map_or(SNAT_PORTS, |ports| ports.0),
        node_ports: args.service_node_port_range.0,
        service_cidrs: args.service_cidrs.clone(),
        ..NodeSettings::default()
    })
}

/// An empty list means all, as with kube-proxy's iptables mode.
fn node_port_addresses(list: &[NodePortAddress]) -> NodePortAddresses {
    let mut wanted = NodePortAddresses { all: list.is_empty(), ..NodePortAddresses::default() };
    for one in list {
        match one {
            NodePortAddress::All => wanted.all = true,
            NodePortAddress::Primary => wanted.primary = true,
            NodePortAddress::Localhost => wanted.localhost = true,
            NodePortAddress::Range(range) => wanted.ranges.push(*range),
        }
    }
    wanted
}

/// A mode without what it needs says nothing, and what a mode does not need contradicts it.
fn detect_local(args: &NetworkArgs) -> Result<DetectLocal, ConfigError> {
    let needs = |mode, flag| ConfigError::DetectLocal { mode, flag };
    Ok(match args.detect_local_mode {
        None if args.cluster_cidr.is_empty() => DetectLocal::Devices,
        Some(DetectLocalMode::ClusterCidr) if args.cluster_cidr.is_empty() => {
            return Err(needs("ClusterCIDR", "--cluster-cidr"));
        }
        None | Some(DetectLocalMode::ClusterCidr) => DetectLocal::ClusterCidr(args.cluster_cidr.clone()),
        Some(DetectLocalMode::NodeCidr) => DetectLocal::NodeCidr,
        Some(DetectLocalMode::BridgeInterface) => {
            let named = args.pod_bridge_interface.clone().filter(|name| !name.is_empty());
            DetectLocal::Bridge(named.ok_or_else(|| needs("BridgeInterface", "--pod-bridge-interface"))?)
        }
        Some(DetectLocalMode::InterfaceNamePrefix) => {
            let named = args.pod_interface_name_prefix.clone().filter(|prefix| !prefix.is_empty());
            let missing = || needs("InterfaceNamePrefix", "--pod-interface-name-prefix");
            DetectLocal::InterfaceNamePrefix(named.ok_or_else(missing)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use proxy_common::config::PortRange;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        network: NetworkArgs,
    }

    fn settings(flags: &str) -> Result<NodeSettings, String> {
        let cli = Cli::try_parse_from([""].into_iter().chain(flags.split_whitespace()));
        let args = cli.map_err(|error| error.to_string())?.network;
        node_settings(&args, std::net::Ipv4Addr::UNSPECIFIED.into()).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_said_is_every_address_and_devices() {
        let all = NodePortAddresses { all: true, ..NodePortAddresses::default() };
        assert_eq!(
            settings("").unwrap(),
            NodeSettings { node_port_addresses: all, ..NodeSettings::default() }
        );
    }

    #[test]
    fn addresses_of_node_ports_add_up() {
        let wanted =
            settings("--nodeport-addresses primary,10.1.2.3/8,localhost").unwrap().node_port_addresses;
        let ranges = vec!["10.0.0.0/8".parse().unwrap()];
        assert_eq!(wanted, NodePortAddresses { all: false, primary: true, localhost: true, ranges });
        assert!(settings("--nodeport-addresses all,localhost").unwrap().node_port_addresses.all);
        assert!(settings("--nodeport-addresses 10.0.0.1").unwrap_err().contains("primary"));
    }

    #[rstest]
    #[case("--cluster-cidr 10.244.0.0/16", DetectLocal::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]))]
    #[case("--detect-local-mode nodecidr --cluster-cidr 10.244.0.0/16", DetectLocal::NodeCidr)]
    #[case("--detect-local-mode BridgeInterface --pod-bridge-interface cni0", DetectLocal::Bridge("cni0".into()))]
    #[case(
        "--detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix cali",
        DetectLocal::InterfaceNamePrefix("cali".into())
    )]
    fn modes(#[case] flags: &str, #[case] expected: DetectLocal) {
        assert_eq!(settings(flags).unwrap().detect_local, expected);
    }

    #[rstest]
    #[case("--detect-local-mode ClusterCIDR", "--cluster-cidr")]
    #[case("--detect-local-mode BridgeInterface", "--pod-bridge-interface")]
    #[case("--detect-local-mode InterfaceNamePrefix", "--pod-interface-name-prefix")]
    fn a_mode_asks_for_what_it_needs(#[case] flags: &str, #[case] flag: &str) {
        assert!(settings(flags).unwrap_err().contains(flag));
    }

    #[test]
    fn a_device_is_on_one_side() {
        assert!(settings("--uplinks tun*,eth1 --local-devices tap*,tun0").is_ok());
        let error = settings("--uplinks tun*,eth1 --local-devices tap*,tun*").unwrap_err();
        assert!(error.contains("--uplinks") && error.contains("--local-devices") && error.contains("tun*"));
        assert!(settings("--local-devices !eth0").unwrap_err().contains("local device"));
    }

    #[rstest]
    #[case("--snat-ports 61000-65535", Some([(61_000, 65_535), (0, 0)]))]
    #[case("--snat-ports 50000-50000", Some([(50_000, 50_000), (0, 0)]))]
    #[case("--snat-ports 1024-29999,61000-65535", Some([(1_024, 29_999), (61_000, 65_535)]))]
    #[case("--snat-ports 61000-65535,1024-29999", None)]
    #[case("--snat-ports 1024-1025,2000-2001,3000-3001", None)]
    #[case("--snat-ports 65535-61000", None)]
    #[case("--snat-ports 80-90", None)]
    #[case("--snat-ports 61000", None)]
    fn ports(#[case] flags: &str, #[case] expected: Option<[(u16, u16); 2]>) {
        let expected = expected.map(|ranges| ranges.map(|(first, last)| PortRange::new(first, last)));
        assert_eq!(settings(flags).ok().map(|settings| settings.snat_ports), expected);
    }
}
