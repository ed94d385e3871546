//! Finds what kube-proxy has put into netfilter, by the names that it uses (`pkg/proxy/nftables/proxier.go`,
//! `pkg/proxy/iptables/proxier.go`, `pkg/proxy/ipvs/proxier.go`, 1.36).

use std::collections::BTreeSet;
use std::fmt;
use std::io;

use rtnetlink::packet_core::NLM_F_DUMP;

use super::legacy;
use super::message::{
    ANY_FAMILY, CHAIN_NAME, CHAIN_TABLE, INET, IPV4, IPV6, Message, NETDEV, NFTABLES, PROTOCOL, find, text,
};
use crate::host::devices;
use crate::host::netlink::Netlink;
use proxy_core::model::plural::plural;

/// The table of kube-proxy's nftables mode, in the families ip and ip6.
pub(super) const TABLE: &str = "kube-proxy";
/// Chains of kube-proxy's iptables and ipvs modes. (KUBE-FIREWALL and KUBE-KUBELET-CANARY are kubelet's.)
const CHAINS: [&str; 13] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-MARK-MASQ",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
    "KUBE-LOAD-BALANCER",
    "KUBE-NODE-PORT",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
];
/// Rules of other programs may jump to this chain, so that it stays when all others are removed; alone it serves no client.
const MARK_CHAIN: &str = "KUBE-MARK-MASQ";
/// The prefixes of chains for single Services and endpoints.
const CHAIN_PREFIXES: [&str; 6] =
    ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-SEP-", "KUBE-FW-", "KUBE-XLB-"];
/// The device of kube-proxy's ipvs mode.
const IPVS_DEVICE: &str = proxy_core::model::IPVS_DEVICE;

/// Ballast's table with the empty chains that keep kube-proxy's connections alive.
pub const TAKEOVER_TABLE: &str = "ballast-takeover";
/// `NFT_MSG_GETCHAIN`.
pub(super) const GET_CHAIN: u16 = 4;

/// A chain of nftables. Chains of iptables are included, since iptables is a front end of nftables.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Chain {
    pub family: u8,
    pub table: String,
    pub name: String,
}

impl Chain {
    /// Whether kube-proxy creates this chain in a table that it shares.
    pub(super) fn is_kube_proxys(&self) -> bool {
        is_kube_proxys(&self.name)
    }
}

pub(super) fn is_kube_proxys(chain: &str) -> bool {
    CHAINS.contains(&chain) || CHAIN_PREFIXES.iter().any(|prefix| chain.starts_with(prefix))
}

/// What was found of kube-proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeProxyRules {
    /// Tables of the nftables mode, as in `ip kube-proxy`.
    pub tables: BTreeSet<String>,
    /// Tables in which the iptables or the ipvs mode has chains, as in `ip nat`, and how many.
    pub chains: BTreeSet<(String, usize)>,
    /// The same for `iptables-legacy`, which no other tool can change.
    pub legacy: BTreeSet<(String, usize)>,
    /// Whether the device of the ipvs mode exists.
    pub ipvs: bool,
    /// Whether the chains exist that keep kube-proxy's connections alive without its rules: `ballast takeover` is in progress.
    pub draining: bool,
    /// Whether the chains of `iptables-legacy` could not be read: there may be more than was found.
    pub is_incomplete: bool,
}

impl KubeProxyRules {
    /// Searches the network namespace of the calling thread. A kernel without nftables has no rules there.
    pub fn read() -> io::Result<Self> {
        let mut found = Self {
            ipvs: devices::list()?.iter().any(|device| device.name == IPVS_DEVICE),
            ..Self::default()
        };
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        for chain in chains()? {
            let table = format!("{} {}", family(chain.family), chain.table);
            if chain.table == TABLE {
                found.tables.insert(table);
            } else if chain.table == TAKEOVER_TABLE {
                found.draining = true;
            } else if chain.is_kube_proxys() && chain.name != MARK_CHAIN {
                *counts.entry(table).or_default() += 1;
            }
        }
        found.chains = counts.into_iter().collect();
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        // `iptables-legacy` is rare: a failure to read it must not hide the other rules.
        let legacy = legacy::chains().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the chains of iptables-legacy");
            found.is_incomplete = true;
            Vec::new()
        });
        for (family, table, chain) in legacy {
            if is_kube_proxys(&chain) && chain != MARK_CHAIN {
                *counts.entry(format!("{family} {table}")).or_default() += 1;
            }
        }
        found.legacy = counts.into_iter().collect();
        Ok(found)
    }

    /// Returns the size of all tables of `iptables-legacy` in bytes: a table can only be read as a whole.
    pub fn legacy_size() -> usize {
        legacy::size()
    }

    /// Whether kube-proxy's rules still translate.
    pub fn has_rules(&self) -> bool {
        self.ipvs || self.translates_by_conntrack()
    }

    /// Whether kube-proxy translates by rules for netfilter's conntrack, and not by IPVS.
    pub fn translates_by_conntrack(&self) -> bool {
        !self.tables.is_empty() || !self.chains.is_empty() || !self.legacy.is_empty()
    }

    /// Whether connections that kube-proxy has started may exist.
    pub fn may_have_connections(&self) -> bool {
        self.has_rules() || self.draining
    }
}

impl fmt::Display for KubeProxyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.tables.iter().map(|table| format!("table {table}"));
        let chains =
            self.chains.iter().map(|(table, count)| format!("{} in {table}", plural(count, "chain")));
        let legacy = self
            .legacy
            .iter()
            .map(|(table, count)| format!("{} in {table} of iptables-legacy", plural(count, "chain")));
        let device = self.ipvs.then(|| format!("device {IPVS_DEVICE}")).into_iter();
        f.write_str(&tables.chain(chains).chain(legacy).chain(device).collect::<Vec<_>>().join(", "))
    }
}

pub(super) fn family(number: u8) -> String {
    match number {
        INET => "inet".to_owned(),
        IPV4 => "ip".to_owned(),
        IPV6 => "ip6".to_owned(),
        NETDEV => "netdev".to_owned(),
        other => format!("family {other}"),
    }
}

/// Returns all chains of nftables.
pub(super) fn chains() -> io::Result<Vec<Chain>> {
    let answers = list(Message::new(NFTABLES, GET_CHAIN, ANY_FAMILY))?;
    Ok(answers.iter().filter_map(chain_of).collect())
}

pub(super) fn chain_of(message: &Message) -> Option<Chain> {
    let name = |kind| find(&message.body, kind).map(text);
    Some(Chain { family: message.family, table: name(CHAIN_TABLE)?, name: name(CHAIN_NAME)? })
}

/// Requests a list; returns an empty list if the kernel does not know the request.
pub(super) fn list(request: Message) -> io::Result<Vec<Message>> {
    match Netlink::to(PROTOCOL).and_then(|mut netlink| netlink.exchange(request, NLM_F_DUMP)) {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPROTONOSUPPORT | libc::ENOENT)) =>
        {
            Ok(Vec::new())
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("KUBE-SERVICES", true)]
    #[case("KUBE-SVC-NPX46M4PTMTKRN6Y", true)]
    #[case("KUBE-SEP-ABC", true)]
    #[case("KUBE-KUBELET-CANARY", false)]
    #[case("KUBE-FIREWALL", false)]
    #[case("KUBE-HOSTPORTS", false)]
    #[case("PREROUTING", false)]
    #[case("KUBE-SERVICES-X", false)]
    fn chains_are_known_by_name(#[case] name: &str, #[case] ours: bool) {
        assert_eq!(is_kube_proxys(name), ours);
    }

    #[test]
    fn kube_proxy_rules_are_described_in_words() {
        let found = KubeProxyRules {
            tables: BTreeSet::from(["ip kube-proxy".to_owned()]),
            chains: BTreeSet::from([("ip nat".to_owned(), 12)]),
            legacy: BTreeSet::from([("ip6 nat".to_owned(), 3)]),
            ipvs: true,
            draining: false,
            is_incomplete: false,
        };
        assert_eq!(
            found.to_string(),
            "table ip kube-proxy, 12 chains in ip nat, 3 chains in ip6 nat of iptables-legacy, device kube-ipvs0"
        );
        assert!(found.has_rules() && !KubeProxyRules::default().has_rules());
        assert!(KubeProxyRules { draining: true, ..KubeProxyRules::default() }.may_have_connections());
    }
}
