//! Converts names of pods and Services to addresses.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::cli::selector::{matches, not_found};
use crate::cli::show::ShowError;
use crate::maps::view::{FrontendRow, FrontendRowKind, Snapshot};
use proxy_cli::args::list::{ApiArgs, NamespaceArgs};
use proxy_cli::question::{Client, ClientArg, Destination, DestinationArg};
use proxy_cli::selector::{DEFAULT_NAMESPACE, SelectorError, ServiceFilter};
use proxy_core::model::lookup::PodFacts;
use proxy_core::model::net::{IpFamily, Protocol};

/// Asks the API server for a pod, by namespace and name; the error is a text.
pub type AskPod = fn(&ApiArgs, &str, &str) -> Result<PodFacts, String>;

/// Returns the client that an argument names, as it appears on `node`; `default`: the namespace of a name without one.
pub(super) fn client(
    arg: &ClientArg,
    default: Option<&str>,
    family: IpFamily,
    node: Option<&str>,
    ask: impl FnOnce(&str, &str) -> Result<PodFacts, String>,
) -> Result<Client, ShowError> {
    let (namespace, name) = match arg {
        ClientArg::Known(client) => return Ok(*client),
        ClientArg::Pod { namespace, name } => (namespace.as_deref().or(default), name),
    };
    let namespace = namespace.unwrap_or(DEFAULT_NAMESPACE);
    let pod = ask(namespace, name).map_err(|why| {
        ShowError::Pod(format!(
            "cannot read the pod {namespace}/{name}: {why}; `kubectl ballast explain` reads pods with your own rights, \
             --kubeconfig names other credentials, and `pod` without a name means any pod of this node"
        ))
    })?;
    let of_node = pod.node.as_deref().unwrap_or("none yet");
    let is_here = node.is_some_and(|node| of_node.eq_ignore_ascii_case(node));
    if pod.has_host_network {
        let elsewhere = format!(
            "pod {namespace}/{name} uses the network of node {of_node}: run the command there, or `kubectl ballast explain`"
        );
        return if is_here { Ok(Client::Host) } else { Err(ShowError::Pod(elsewhere)) };
    }
    let address = pod.addresses.iter().find(|address| IpFamily::of(**address) == family);
    let address =
        *address.ok_or_else(|| ShowError::Pod(format!("pod {namespace}/{name} has no {family} address")))?;
    Ok(if is_here { Client::Pod(Some(address)) } else { Client::Address(address) })
}

/// Returns the Service that an argument names. `default`: as for [`client`].
pub(super) fn filter(text: &str, default: Option<&str>) -> Result<ServiceFilter, SelectorError> {
    ServiceFilter::parse_with_default(text, &NamespaceArgs::default(), default.unwrap_or(DEFAULT_NAMESPACE))
}

/// Returns the destination that an argument names: of a Service, the cluster address. `default`: as for [`client`].
pub(super) fn destination(
    arg: &DestinationArg,
    default: Option<&str>,
    family: Option<IpFamily>,
    snapshot: &Snapshot,
) -> Result<Destination, ShowError> {
    let (text, protocol) = match arg {
        DestinationArg::Address(destination) => return Ok(*destination),
        DestinationArg::Service(text, protocol) => (text, *protocol),
    };
    let filter = filter(text, default)?;
    let is_meant = |row: &&FrontendRow| {
        let name = snapshot.names.get(&row.service);
        name.is_some_and(|name| matches(&filter, row.service, name, snapshot))
    };
    let rows: Vec<_> = snapshot.frontends.iter().filter(is_meant).collect();
    if rows.is_empty() {
        return Err(not_found(&filter, snapshot).into());
    }
    let is_of_family = |row: &&FrontendRow| family.is_none_or(|meant| IpFamily::of(row.address) == meant);
    let is_of_protocol =
        |row: &&FrontendRow| protocol.is_none_or(|protocol| row.protocol.0 == protocol.number());
    let has_address = |row: &&FrontendRow| !row.address.is_unspecified();
    // The cluster address, if there is one; of two families the first one.
    let mut ports: BTreeMap<(u16, u8), &FrontendRow> = BTreeMap::new();
    let mut usable: Vec<_> =
        rows.iter().copied().filter(is_of_family).filter(is_of_protocol).filter(has_address).collect();
    usable.sort_by_key(|row| (row.kind != FrontendRowKind::ClusterIp, row.address));
    for row in usable {
        ports.entry((row.port, row.protocol.0)).or_insert(row);
    }
    let tcp: Vec<_> =
        ports.values().filter(|row| row.protocol.0 == Protocol::Tcp.number()).copied().collect();
    let all: Vec<_> = ports.values().copied().collect();
    let (([one], _) | (_, [one])) = (all.as_slice(), tcp.as_slice()) else {
        let wanted = family.map(|family| format!(" and an {family} address")).unwrap_or_default();
        let wanted = protocol.map_or_else(|| wanted.clone(), |protocol| format!(" by {protocol}{wanted}"));
        let ports = rows.iter().filter_map(|row| {
            let name = snapshot.names.get(&row.service)?;
            let named = if name.port.is_empty() { String::new() } else { format!(" ({})", name.port) };
            Some(format!("{}/{}{named}", row.port, row.protocol))
        });
        let ports: std::collections::BTreeSet<String> = ports.collect();
        return Err(ShowError::Destination(format!(
            "{text} is not one frontend{wanted}: give one of its ports: {}",
            ports.into_iter().collect::<Vec<_>>().join(", ")
        )));
    };
    let protocol = Protocol::from_number(one.protocol.0).unwrap_or(Protocol::Tcp);
    Ok(Destination { to: SocketAddr::new(one.address, one.port), protocol })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::cli::show::tests::cluster;

    #[rstest]
    #[case("svc/redis", None, "10.96.0.10:6379/TCP")]
    #[case("default/redis:resp", Some(IpFamily::V6), "[fd00:96::a]:6379/TCP")]
    #[case("kube-system/kube-dns/udp", None, "10.96.0.10:53/UDP")]
    #[case("web/shop:443", None, "203.0.113.5:443/TCP")]
    #[case("kube-system/kube-dns/tcp", None, "give one of its ports: 53/UDP (dns)")]
    #[case("rdis", None, "did you mean default/redis?")]
    #[case("web/shop", Some(IpFamily::V6), "an IPv6 address")]
    fn service_as_destination_becomes_its_cluster_address(
        #[case] text: &str,
        #[case] family: Option<IpFamily>,
        #[case] expected: &str,
    ) {
        let found = destination(&text.parse().unwrap(), None, family, &cluster());
        let shown = found.map_or_else(|error| error.to_string(), |destination| destination.to_string());
        assert!(shown.contains(expected), "{shown}");
    }

    #[test]
    fn namespace_flag_is_for_names_without_one() {
        let web = |text: &str| {
            let found = destination(&text.parse().unwrap(), Some("web"), None, &cluster());
            found.map_or_else(|error| error.to_string(), |destination| destination.to_string())
        };
        assert_eq!(web("shop:443"), "203.0.113.5:443/TCP");
        assert_eq!(web("default/redis"), "10.96.0.10:6379/TCP");
        let found = client(&"pod/a".parse().unwrap(), Some("web"), IpFamily::V4, None, |namespace, _| {
            Err(format!("cannot read {namespace}"))
        });
        let error = found.unwrap_err().to_string();
        assert!(error.contains("cannot read web; `kubectl ballast explain` reads pods"), "{error}");
    }

    #[rstest]
    #[case::here(PodFacts { node: Some("a".into()), addresses: vec![[10, 0, 0, 7].into()], has_host_network: false }, "pod 10.0.0.7")]
    #[case::elsewhere(PodFacts { node: Some("b".into()), addresses: vec![[10, 0, 0, 7].into()], has_host_network: false }, "10.0.0.7")]
    #[case::host_network(PodFacts { node: Some("a".into()), has_host_network: true, addresses: Vec::new() }, "host")]
    #[case::host_network_elsewhere(PodFacts { node: Some("b".into()), has_host_network: true, addresses: Vec::new() }, "network of node b")]
    #[case::other_family(PodFacts { node: Some("a".into()), addresses: vec!["fd00::7".parse().unwrap()], has_host_network: false }, "no IPv4 address")]
    fn a_pod_is_a_client_of_this_node_or_an_address(#[case] pod: PodFacts, #[case] expected: &str) {
        let found = client(&"pod/web".parse().unwrap(), None, IpFamily::V4, Some("a"), |namespace, name| {
            assert_eq!((namespace, name), ("default", "web"));
            Ok(pod)
        });
        let text = found.map_or_else(|error| error.to_string(), |client| client.to_string());
        assert!(text.contains(expected), "{text}");
    }
}
