//! Finds chains of netfilter that drop what no rule accepts.
//!
//! Rules that accept connections by their destination NAT (`ct status dnat`, kube-proxy's chain KUBE-FORWARD) accept nothing of
//! Ballast, whose programs translate before netfilter.

use std::io;

use super::kube_proxy_rules::{CHAIN_NAME, CHAIN_TABLE, GET_CHAIN, family, list};
use super::message::{ANY_FAMILY, Message, NFTABLES, find, find_below, text};

/// `NFTA_CHAIN_HOOK` (`include/uapi/linux/netfilter/nf_tables.h`).
const HOOK: u16 = 4;
/// `NFTA_CHAIN_POLICY`.
const POLICY: u16 = 5;
/// `NFTA_HOOK_HOOKNUM`.
const HOOK_NUMBER: u16 = 1;
/// `NF_INET_LOCAL_IN` and `NF_INET_FORWARD`.
const HOOKS: [u32; 2] = [1, 2];
/// `NF_DROP`.
const DROP: u32 = 0;
/// The table of firewalld, whose chains have the policy accept and end in a rule that rejects.
const FIREWALLD: &str = "firewalld";

/// Returns the chains for packets to this node and through it that drop or reject what no rule accepts, like `FORWARD of ip
/// filter`. Chains of iptables are included, those of iptables-legacy are not.
pub fn dropping() -> io::Result<Vec<String>> {
    let answers = list(Message::new(NFTABLES, GET_CHAIN, ANY_FAMILY))?;
    let mut found: Vec<_> = answers.iter().filter_map(of_chain).collect();
    found.sort();
    found.dedup();
    Ok(found)
}

fn of_chain(message: &Message) -> Option<String> {
    let number = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_be_bytes);
    let name = |kind| find(&message.body, kind).map(text);
    let (table, name) = (name(CHAIN_TABLE)?, name(CHAIN_NAME)?);
    let hook = find_below(&message.body, &[HOOK, HOOK_NUMBER]).and_then(number)?;
    let drops = find(&message.body, POLICY).and_then(number) == Some(DROP) || table == FIREWALLD;
    (HOOKS.contains(&hook) && drops).then(|| format!("{name} of {} {table}", family(message.family)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netfilter::message::{INET, IPV4};

    fn chain(family: u8, table: &str, name: &str, hook: u32, policy: u32) -> Message {
        let number = Message::new(NFTABLES, GET_CHAIN, family).with(HOOK_NUMBER, &hook.to_be_bytes());
        Message::new(NFTABLES, GET_CHAIN, family)
            .with_text(CHAIN_TABLE, table)
            .with_text(CHAIN_NAME, name)
            .with(HOOK, &number.body)
            .with(POLICY, &policy.to_be_bytes())
    }

    #[test]
    fn chains_with_policy_drop_and_those_of_firewalld_are_found() {
        let found = |chain: Message| of_chain(&chain);
        assert_eq!(found(chain(IPV4, "filter", "FORWARD", 2, 0)).as_deref(), Some("FORWARD of ip filter"));
        assert_eq!(found(chain(IPV4, "filter", "FORWARD", 2, 1)), None);
        assert_eq!(found(chain(IPV4, "filter", "OUTPUT", 3, 0)), None);
        let firewalld = chain(INET, "firewalld", "filter_INPUT", 1, 1);
        assert_eq!(found(firewalld).as_deref(), Some("filter_INPUT of inet firewalld"));
        let regular = Message::new(NFTABLES, GET_CHAIN, IPV4).with_text(CHAIN_TABLE, "filter");
        assert_eq!(found(regular.with_text(CHAIN_NAME, "DOCKER")), None);
    }
}
